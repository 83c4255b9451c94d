"""A run that only evaluates: it skips training, or a requeued job finds that it had finished."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import FULL, OVERLAP, Row, check_records
from tests.end_to_end.training import train

pytestmark = pytest.mark.gloo

TO_HOST = "--offload-activations on --lazy-inter-segment"
OFFLOADED = Row(f"aiao {TO_HOST}", f"{FULL} uniform")
PREEMPTED = Row("1f1b --preemptive-comm", OVERLAP, pp=1, dp=2, segments=1)
EVERYTHING = Row(
    "aiao:step=next:wgrad=last@1:share=0.5 --preemptive-comm --lazy-inter-segment --trace TRACE",
    f"{FULL} uniform --overlap-grad-reduce",
    dp=2,
)
SHARDED = Row("aiao", OVERLAP)
PLAIN = Row()
ROWS = (PLAIN, PREEMPTED, OFFLOADED, SHARDED, EVERYTHING)


@pytest.mark.parametrize("row", [PREEMPTED, OFFLOADED, SHARDED], ids=str)
def test_what_is_only_evaluated_has_the_losses_of_stock(row: Row) -> None:
    row = replace(row, flags=f"{row.flags} --skip-train")
    record = run_distributed(train, row.num_ranks, row.command(row.ours))

    assert len(record[-1].evaluations) == 2  # validation and test
    check_records(row, record)


@pytest.mark.parametrize("row", [PLAIN, EVERYTHING], ids=str)
def test_a_finished_run_is_evaluated_again(row: Row, tmp_path: Path, finished: Path) -> None:
    # Its optimizer may have been another.
    row = replace(row, flags=f"{row.flags} --load {finished} --no-load-optim --no-load-rng")
    ours = row.command(row.ours.replace("TRACE", str(tmp_path)))
    record = run_distributed(train, row.num_ranks, ours)

    assert record[-1].iterations == []
    check_records(row, record)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a run that has come to its end."""
    path = tmp_path_factory.mktemp("finished")
    run_distributed(
        train, 2, Row(segments=1).command(f"--schedule stock --save {path} --save-interval 4")
    )
    return path
