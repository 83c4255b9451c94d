"""A run that only evaluates: it skips training, or a requeued job finds that it had finished."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import FULL, OVERLAP, Row
from tests.end_to_end.training import differences, marked, once, train

pytestmark = pytest.mark.gloo

ONE_MODEL = "--num-layers 4"  # of all layouts, as they load one checkpoint
TO_HOST = "--offload-activations on --lazy-inter-segment"
CARRIED = Row(segments=2, flags="--overlap-grad-reduce", ours="--schedule aiao:step=next:share=0.5")
OFFLOADED = Row(segments=2, flags=f"{FULL} uniform", ours=f"--schedule aiao {TO_HOST}")
TRACED = Row(segments=2, ours="--schedule aiao --trace TRACE")
PREEMPTED = Row(pp=1, dp=2, flags=OVERLAP, ours="--schedule 1f1b --preemptive-comm")
ROWS = (
    Row(segments=2),
    CARRIED,
    Row(pp=1, dp=2, flags="--overlap-grad-reduce", ours="--schedule 1f1b:step=next", repeats=True),
    Row(segments=2, ours="--schedule aiao:wgrad=last@1", repeats=True),
    Row(segments=2, ours="--schedule aiao --preemptive-comm", repeats=True),
    PREEMPTED,
    OFFLOADED,
    TRACED,
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


def rows(*but: Row) -> list[Any]:
    """Return all rows; what the other test shows of some of them is `stress`."""
    return marked(replace(row, repeats=row.repeats or row in but) for row in ROWS)


@pytest.mark.parametrize("row", rows(CARRIED, TRACED), ids=lambda row: f"{row}, {row.flags}")
def test_what_is_only_evaluated_has_the_losses_of_stock(row: Row, tmp_path: Path) -> None:
    ours = row.command(f"{row.ours} {ONE_MODEL} --skip-train".replace("TRACE", str(tmp_path)))
    record = run_distributed(train, row.num_ranks, ours)

    assert len(record[-1].evaluations) == 2  # validation and test
    stock = row.command(f"--schedule stock {row.stock} {ONE_MODEL} --skip-train")
    assert differences(record, once(train, row.num_ranks, stock)) == []


@pytest.mark.parametrize("row", rows(OFFLOADED, PREEMPTED), ids=lambda row: f"{row}, {row.flags}")
def test_a_finished_run_is_evaluated_again(row: Row, tmp_path: Path, finished: Path) -> None:
    # Its optimizer may have been another.
    resumed = f"{ONE_MODEL} --load {finished} --no-load-optim --no-load-rng"
    ours = row.command(f"{row.ours} {resumed}".replace("TRACE", str(tmp_path)))
    record = run_distributed(train, row.num_ranks, ours)

    assert record[-1].iterations == []
    stock = row.command(f"--schedule stock {row.stock} {resumed}")
    assert differences(record, once(train, row.num_ranks, stock)) == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a run that has come to its end."""
    path = tmp_path_factory.mktemp("finished")
    saving = f"--schedule stock {ONE_MODEL} --save {path} --save-interval 4"
    run_distributed(train, 2, Row().command(saving))
    return path
