"""Gradients that are summed in a code are those that stock sums whole."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.test_delta_gather import BF16, IN_BF16, STOCK
from tests.end_to_end.test_equal_to_stock import (
    BUCKETS,
    EP,
    EXPERTS,
    FP16,
    OVERLAP,
    UNTIED,
    ZERO,
    Row,
)
from tests.end_to_end.training import Record, differences, heard, marked, once, train

pytestmark = pytest.mark.gloo

SUMMED = "gradients were summed in "  # so many percent of their bytes
CODED = "--coded-grad-reduce on"
_ROWS = (
    Row("stock", IN_BF16, dp=2),
    Row("stock", f"{BF16} {BUCKETS}", dp=2, segments=2),
    Row("stock", OVERLAP, dp=2),
    Row("stock", f"{ZERO} --bf16", dp=2),
    Row("aiao", IN_BF16, dp=2, segments=2),
    Row("aiao --delta-param-gather on", IN_BF16, dp=2, segments=2),
    Row("aiao:wgrad=behind@0:optimizer=replicated@1", f"{BF16} {UNTIED}", dp=2, segments=2),
    Row("aiao:wgrad=last", f"{IN_BF16} {BUCKETS}", dp=2, segments=2, repeats=True),
    Row("zb-h1", IN_BF16, dp=2),
    Row("1f1b", f"{BF16} --sequence-parallel", pp=1, tp=2, dp=2, repeats=True),
    Row("stock", IN_BF16, pp=1, cp=2, dp=1, repeats=True),
    Row("1f1b", f"{BF16} {EXPERTS} --moe-token-dispatcher-type alltoall {EP}", pp=1, dp=4),
    Row("aiao", f"{OVERLAP} {FP16}", dp=2),
    Row("1f1b", BF16, pp=1, dp=3),
    Row("stock", IN_BF16, pp=1, dp=4),
)
ROWS = tuple(replace(row, word=f"{row.word} {CODED}") for row in _ROWS)


def coded(argv: Sequence[str]) -> tuple[Record, list[str]]:
    """Train with coded sums; return what is recorded and what the run says of them."""
    said = heard("megatron.fold3d.runtime.grad_sync.coded_sums")
    return train(argv), said


@pytest.mark.parametrize("row", marked(ROWS), ids=str)
def test_what_is_trained_is_what_stock_trains(row: Row) -> None:
    found = run_distributed(coded, row.num_ranks, row.command(row.ours))

    assert any(line.startswith(SUMMED) for line in found[0][1]), found[0][1]
    stock = once(train, row.num_ranks, row.command(STOCK))
    assert differences([record for record, _ in found], stock) == []
