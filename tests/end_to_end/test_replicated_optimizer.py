"""``optimizer=replicated`` trains what stock's distributed optimizer does, bit for bit.

Beside losses and parameters the rows compare each replica's own shards and moments: the other
replicas' are gone from the optimizer when a step is done.
"""

from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import (
    BUCKETS,
    EXPERTS,
    MTP,
    ONE_GROUP,
    OVERLAP,
    UNTIED,
    Row,
    check,
    stock_of,
)
from tests.end_to_end.test_param_shards import MORE_AND_MORE
from tests.end_to_end.training import check_losses, train

pytestmark = pytest.mark.gloo

REPLICATED = "1f1b:optimizer=replicated@0"
SKIPS = "--fp16 --no-check-for-nan-in-loss-and-grad --initial-loss-scale 524288 --hysteresis 1"

ROWS = (
    Row(
        "aiao:optimizer=replicated@0,2,3:wgrad=last@1",
        f"{OVERLAP} --bf16 {BUCKETS}",
        segments=4,
        dp=2,
        m=3,
        stock=ONE_GROUP,
    ),
    Row(
        f"{REPLICATED}:wgrad=behind@0",
        f"{OVERLAP} {SKIPS} --sequence-parallel",
        pp=1,
        tp=2,
        dp=2,
        m=2,
        segments=1,
    ),
    Row(
        REPLICATED,
        f"{OVERLAP} {EXPERTS} {MORE_AND_MORE} --calculate-per-token-loss --no-align-param-gather",
        pp=1,
        dp=2,
        segments=1,
    ),
    Row(
        REPLICATED,
        f"{OVERLAP} {EXPERTS} --sequence-parallel --expert-tensor-parallel-size 1",
        pp=1,
        tp=2,
        m=2,
        segments=1,
    ),
    Row(
        "aiao:optimizer=replicated@0,2",
        f"{OVERLAP} {MTP} {UNTIED}",
        segments=3,
        dp=2,
        m=2,
        stock=ONE_GROUP,
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_losses_norms_parameters_and_shards_are_those_of_stock(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


def test_four_replicas_differ_from_stock_by_rounding() -> None:
    # An all-reduce adds up an element's terms in another order than a reduce-scatter. With so large
    # an epsilon, Adam does not divide what that changes by gradients near zero.
    flags = f"{OVERLAP} --adam-eps 1 --lr 0.1 --clip-grad 0.5"
    row = Row(REPLICATED, flags, pp=1, dp=4, m=2, segments=1)
    check_losses(run_distributed(train, 4, row.command(row.ours)), stock_of(row))
