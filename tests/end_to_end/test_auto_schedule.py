"""``--schedule auto`` trains what stock does, bit for bit, whatever it tries and chooses."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.policy.predicted import Predicted
from tests.distributed import run_distributed
from tests.end_to_end.test_backward_share import SP, Row
from tests.end_to_end.test_equal_to_stock import compared, stock_of
from tests.end_to_end.training import Record, check_losses, heard, train, watch

pytestmark = pytest.mark.gloo

OVERLAP = "--use-distributed-optimizer --overlap-param-gather --bf16"
FP16 = "--fp16 --initial-loss-scale 524288 --hysteresis 1"
LONGER = "--train-iters 12 --eval-interval 8"

AUTO = "auto"
CASES: tuple[tuple[Row, tuple[str, ...]], ...] = (
    (  # some steps are clipped, others could be: what they interrupt is tried later
        Row(word=AUTO, flags=f"{LONGER} --train-iters 16", clip=2.2, segments=4),
        ("aiao:step=next:wgrad=last@2", "breadth-first:wgrad=behind@1:wgrad=last@3"),
    ),
    (
        Row(word=AUTO, flags=f"{LONGER} {OVERLAP}", clip=2.2, segments=4),
        ("aiao:optimizer=replicated@0,2,3:wgrad=last@1", "breadth-first"),
    ),
    (Row(word=AUTO, flags=f"{LONGER} {FP16}", pp=2, segments=1, dp=1), ()),
)


@pytest.mark.parametrize(("row", "tried"), CASES, ids=[str(row) for row, _ in CASES])
def test_losses_norms_and_parameters_are_those_of_stock(row: Row, tried: tuple[str, ...]) -> None:
    told = compared(row, train_and_choose, tried)
    assert told[1] == []  # one rank tells
    if tried:
        took = ["0.1", "s", "0.1", "s"]
        measured, head, first, *others = told[0][-1].splitlines()
        assert measured.startswith("--schedule auto measured F ")
        assert head.split() == ["choice", "predicted", "took"]
        assert first.split()[3:] == ["0.3", "s"]
        assert [line.split()[0] for line in others] == [*tried]
        assert others[0].split()[1:6] in ([*took, "kept"], [*took, "kept;"])
        assert ("shares" in others[0]) is ("step=next" in tried[0])


WHOLE = Row(word="1f1b:optimizer=auto", flags=f"--train-iters 9 {OVERLAP}", pp=1, segments=1, m=2)


@pytest.mark.parametrize("took_s", [(0.3, 0.1), (0.1, 0.3)])
def test_auto_of_the_optimizer_keeps_what_was_faster(took_s: tuple[float, ...]) -> None:
    tried = ("1f1b:optimizer=replicated",)
    told = compared(WHOLE, train_and_choose, tried, took_s)
    (table,) = told[0]
    assert table.startswith("optimizer=auto measured F ")
    kept = [bool(re.search(r"  kept after \d+ iterations$", line)) for line in table.splitlines()]
    assert kept[-2:] == [took_s[0] < took_s[1], took_s[1] < took_s[0]]
    assert told[1] == []


def test_sums_of_four_replicas_may_be_rounded_otherwise_and_that_is_told() -> None:
    # As in test_backward_share: SGD does not blow up what another order of additions changes. Other
    # layers have two replicas, experts have four.
    experts = "--num-experts 2 --disable-bias-linear --expert-tensor-parallel-size 1"
    flags = f"--train-iters 9 --optimizer sgd {SP} {experts}"
    row = Row(word=AUTO, flags=flags, pp=1, segments=1, tp=2)
    runs = run_distributed(train_and_choose, 4, row.command(row.ours), ("1f1b:step=next",))
    ours, told = zip(*runs, strict=True)
    check_losses(ours, stock_of(row))
    assert "adds up the gradients of 4 replicas in another order" in told[0][0]
    assert told[0][1].splitlines()[-1].startswith("  1f1b:step=next  0.1 s      0.1 s  kept")


def test_four_replicas_keep_stocks_sums_with_deterministic_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")  # Megatron demands it
    flags = f"--train-iters 9 --deterministic-mode {OVERLAP}"
    row = Row(word=AUTO, flags=flags, pp=1, segments=1, dp=4, clip=2.2)
    told = compared(row, train_and_choose, ("1f1b:wgrad=last",))
    assert told[0][0].splitlines()[-1].startswith("  1f1b:wgrad=last  0.1 s      0.1 s  kept")
    assert "another order" not in " ".join(told[0])


def train_and_choose(
    argv: Sequence[str], tried: Sequence[str], took_s: Sequence[float] = (0.3, 0.1, 0.2)
) -> tuple[Record, list[str]]:
    """Train; some choices are predicted, and measured to take so long behind the first one.

    Returns also what is told of the choice.
    """
    from megatron.fold3d.predict.search.descent import Descent
    from megatron.fold3d.runtime import auto_schedule

    def to_try(self: Descent) -> list[Predicted]:
        job, found = self.first.job, []
        for word in tried:
            choice = Choice.parse(word, len(job.choice.segments))
            shares = (0.5,) * job.computed.num_stages if choice.carries else ()
            changed = replace(job, choice=choice, order=None, shares=shares)
            found.append(Predicted(job=changed, seconds=0.1))
        return found

    def take(_: Any, auto: Any, *__: Any) -> None:
        if auto._took_s is not None:
            auto._took_s = took_s[auto._index]

    if tried:
        Descent.to_try = to_try
        watch(auto_schedule.AutoSchedule, "step", after=take)
    told = heard(auto_schedule.__name__)
    return train(argv), told
