"""A run that only evaluates: it skips training, or a requeued job finds that it had finished."""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import FULL, OVERLAP, Row
from tests.end_to_end.training import Record, differences, marked, train

pytestmark = pytest.mark.gloo

ONE_MODEL = "--num-layers 4"  # of all layouts, as they load one checkpoint
TO_HOST = "--offload-activations on --lazy-inter-segment"
ROWS = (
    Row(segments=2),
    Row(segments=2, flags="--overlap-grad-reduce", ours="--schedule aiao:step=next:share=0.5"),
    Row(pp=1, dp=2, flags="--overlap-grad-reduce", ours="--schedule 1f1b:step=next", repeats=True),
    Row(segments=2, ours="--schedule aiao:wgrad=last@1", repeats=True),
    Row(segments=2, ours="--schedule aiao --preemptive-comm", repeats=True),
    Row(pp=1, dp=2, flags=OVERLAP, ours="--schedule 1f1b --preemptive-comm"),
    Row(segments=2, flags=f"{FULL} uniform", ours=f"--schedule aiao {TO_HOST}"),
    Row(segments=2, ours="--schedule aiao --trace TRACE"),
    Row(segments=2, flags="--use-distributed-optimizer", repeats=True),
    Row(segments=2, flags=OVERLAP),
    Row(
        segments=2,
        dp=2,
        flags=f"{FULL} uniform --overlap-grad-reduce",
        ours="--schedule aiao:step=next:wgrad=last@1:share=0.5 --preemptive-comm "
        "--lazy-inter-segment --trace TRACE",
    ),
)


@pytest.mark.parametrize("row", marked(ROWS), ids=lambda row: f"{row}, {row.flags}")
def test_what_is_only_evaluated_has_the_losses_of_stock(row: Row, tmp_path: Path) -> None:
    ours = row.command(f"{row.ours} {ONE_MODEL} --skip-train".replace("TRACE", str(tmp_path)))
    record = run_distributed(train, row.num_ranks, ours)

    assert len(record[-1].evaluations) == 2  # validation and test
    stock = row.command(f"--schedule stock {row.stock} {ONE_MODEL} --skip-train")
    assert differences(record, _reference(row.num_ranks, stock)) == []


@pytest.mark.parametrize("row", marked(ROWS), ids=lambda row: f"{row}, {row.flags}")
def test_a_finished_run_is_evaluated_again(row: Row, tmp_path: Path, finished: Path) -> None:
    # Its optimizer may have been another.
    resumed = f"{ONE_MODEL} --load {finished} --no-load-optim --no-load-rng"
    ours = row.command(f"{row.ours} {resumed}".replace("TRACE", str(tmp_path)))
    record = run_distributed(train, row.num_ranks, ours)

    assert record[-1].iterations == []
    stock = row.command(f"--schedule stock {row.stock} {resumed}")
    assert differences(record, _reference(row.num_ranks, stock)) == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a run that has come to its end."""
    path = tmp_path_factory.mktemp("finished")
    saving = f"--schedule stock {ONE_MODEL} --save {path} --save-interval 4"
    run_distributed(train, 2, Row().command(saving))
    return path


@functools.cache
def _reference(num_ranks: int, argv: Sequence[str]) -> list[Record]:
    records: list[Record] = run_distributed(train, num_ranks, argv)
    return records
