"""``optimizer=replicated`` trains what stock's distributed optimizer does, bit for bit.

Beside losses and parameters the rows compare each replica's own shards and moments: the other
replicas' are gone from the optimizer when a step is done.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.fold3d.policy.predicted import Predicted
from tests.distributed import run_distributed
from tests.end_to_end.test_checkpoints import check_resumed
from tests.end_to_end.test_equal_to_stock import (
    BUCKETS,
    EXPERTS,
    MTP,
    ONE_GROUP,
    OVERLAP,
    UNTIED,
    Row,
    check,
)
from tests.end_to_end.test_param_shards import MORE_AND_MORE
from tests.end_to_end.training import (
    Record,
    check_losses,
    differences,
    heard,
    once,
    train,
)

pytestmark = pytest.mark.gloo

STOCK = "--schedule stock"
REPLICATED = "1f1b:optimizer=replicated@0"
ALONE = f"--schedule {REPLICATED}"
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
    ),
    Row(
        REPLICATED,
        f"{OVERLAP} {EXPERTS} {MORE_AND_MORE} --calculate-per-token-loss --no-align-param-gather",
        pp=1,
        dp=2,
    ),
    Row(
        REPLICATED,
        f"{OVERLAP} {EXPERTS} --sequence-parallel --expert-tensor-parallel-size 1",
        pp=1,
        tp=2,
        m=2,
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
AUTO = Row("1f1b:optimizer=auto", f"{OVERLAP} --bf16 --train-iters 9", pp=1, dp=2, m=2)
SAVED = Row(pp=1, dp=2, m=2, flags=f"{OVERLAP} --bf16")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_losses_norms_parameters_and_shards_are_those_of_stock(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


@pytest.mark.parametrize("with_s", [0.0, 1e9])
def test_auto_keeps_what_was_faster_and_changes_no_result(with_s: float) -> None:
    ours, told = zip(
        *run_distributed(train_and_choose, 2, AUTO.command(AUTO.ours), with_s), strict=True
    )
    assert differences(ours, once(train, 2, AUTO.command(STOCK))) == []
    (table,) = told[0]
    assert table.startswith("optimizer=auto measured F ")
    first, tried = table.splitlines()[-2:]
    assert tried.split()[:3] == ["1f1b:optimizer=replicated", "0.1", "s"]
    kept = [bool(re.search(r"  kept after \d+ iterations$", line)) for line in (first, tried)]
    assert kept == [with_s > 0, with_s == 0]
    assert told[1] == []  # one rank tells


def train_and_choose(argv: Sequence[str], with_s: float) -> tuple[Record, list[str]]:
    """Train with segment 0 as the prediction; it takes ``with_s`` longer, or no time if that is 0.

    Returns also what is told of the choice.
    """
    from megatron.fold3d.predict.search.descent import Descent
    from megatron.fold3d.runtime import auto_schedule

    def to_try(self: Descent) -> list[Predicted]:
        whole = self.first.choice.changed((0,), optimizer="replicated")
        return [Predicted(job=replace(self.first.job, choice=whole), seconds=0.1)]

    step = auto_schedule.AutoSchedule.step

    def noted(self: Any, take: Any) -> Any:
        outcome = step(self, take)
        if self._took_s is not None and self._index:
            self._took_s = with_s
        return outcome

    Descent.to_try = to_try
    auto_schedule.AutoSchedule.step = noted
    told = heard(auto_schedule.__name__)
    return train(argv), told


def test_four_replicas_differ_from_stock_by_rounding() -> None:
    # An all-reduce adds up an element's terms in another order than a reduce-scatter. With so large
    # an epsilon, Adam does not divide what that changes by gradients near zero.
    row = Row(pp=1, dp=4, m=2, flags=f"{OVERLAP} --adam-eps 1 --lr 0.1 --clip-grad 0.5")
    ours, stock = (
        run_distributed(train, row.num_ranks, row.command(which)) for which in (ALONE, STOCK)
    )
    check_losses(ours, stock)


@pytest.mark.parametrize(("saves", "resumes"), [(ALONE, STOCK), (STOCK, ALONE)])
def test_checkpoints_are_those_of_stock(saves: str, resumes: str, tmp_path: Path) -> None:
    check_resumed(SAVED, saves, resumes, tmp_path)
