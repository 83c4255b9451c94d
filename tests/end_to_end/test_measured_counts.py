"""`--recompute-layers auto` trains what stock trains, and takes no more memory than it predicts."""

import re
from collections.abc import Sequence

import pytest

from tests.distributed import RankError, run_distributed
from tests.end_to_end.test_equal_to_stock import DROPOUT, ONE_GROUP, Row, compared
from tests.end_to_end.training import Record, heard, train

pytestmark = pytest.mark.gloo

AUTO = "--recompute-layers auto --activation-memory-bytes"
ROWS = (
    Row(f"aiao:recompute=early@0 {AUTO} 260000", f"{DROPOUT} --num-layers 8", stock=ONE_GROUP),
    Row(f"1f1b {AUTO} 60000", "--sequence-parallel --bf16 --num-layers 8", tp=2, m=2, segments=1),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_results_are_those_of_stock_and_the_peak_is_as_predicted(row: Row) -> None:
    lines, *_ = compared(row, train_and_listen)
    assert len(lines) == 2, lines
    counts, _, most, limits = numbers(lines[0])
    measured, predicted = numbers(lines[1])[-2:]
    assert most == predicted
    assert len(counts) == row.pp * row.segments
    assert 0 < sum(counts) < 8  # some layers are recomputed, and some are not
    rows = list(zip(measured, most, limits, strict=True))
    assert all(0.9 * held < took <= held <= limit for took, held, limit in rows), lines


def test_too_little_memory_names_the_rank_and_the_bytes() -> None:
    row = Row(word=f"aiao {AUTO} 3", segments=1)
    with pytest.raises(RankError, match=r"auto: rank 0: found \d+ bytes with all .* 3 bytes of"):
        run_distributed(train, row.num_ranks, row.command(row.ours))


def numbers(line: str) -> list[list[int]]:
    """The lists of numbers in a line."""
    return [[*map(int, found.split(","))] for found in re.findall(r"\d+(?:, ?\d+)*", line)]


def train_and_listen(argv: Sequence[str]) -> tuple[Record, list[str]]:
    """Train on this rank, and return what the choice of layers has logged."""
    lines = heard("megatron.fold3d.runtime.measured_counts")
    return train(argv), lines
