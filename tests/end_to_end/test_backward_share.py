"""Optimizer steps in the next iteration end where stock's end, bit for bit: one table, one test.

All rows train six iterations with a learning rate and a weight decay that change in each, and
evaluate after the third.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.end_to_end import test_equal_to_stock as equal_to_stock
from tests.end_to_end.test_equal_to_stock import UNTIED, ZERO, check_records, compared, stock_of
from tests.end_to_end.training import (
    Record,
    as_known,
    check_losses,
    differences,
    heard,
    marked,
    train,
    train_as_planned,
    watch,
)

pytestmark = pytest.mark.gloo

SIX = (
    "--train-iters 6 --lr-decay-iters 10 --lr-warmup-iters 2 --start-weight-decay 0.01 "
    "--end-weight-decay 0.1 --weight-decay-incr-style linear --overlap-grad-reduce --log-interval 1"
)
SKIPPED_ABOVE = 2.3  # what norms are in some iterations
NORM = re.compile(r"grad norm of iteration (\d+): ([^,]+)(?:, bound (.+))?")
STEPS = re.compile(r"steps: (\d+) reached into the next iteration, (\d+) waited .*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(equal_to_stock.Row):
    """One comparison; ``word`` says what the share is, and how our run is scheduled.

    ``whole`` is the number of steps for which all gradients are waited for, ``skipped`` of those
    that are not taken.
    """

    flags: str = UNTIED
    clip: float = 0
    whole: int = 0
    skipped: int = 0
    dp: int = 2

    def command(self, scheduled: str) -> tuple[str, ...]:
        layers = 4 if self.pp * self.segments <= 2 else 8
        flags = f"{SIX} --num-layers {layers} --clip-grad {self.clip} {self.flags}"
        return equal_to_stock.Row.command(replace(self, flags=flags), scheduled)


AIAO = "aiao:step=next"
ONE = "1f1b:step=next"
SP = "--sequence-parallel"
FP16 = "--fp16 --initial-loss-scale 524288 --hysteresis 1"
SHARDED = f"{ZERO} --overlap-param-gather"
# Gradients of 16 bits travel; each replica adds its own up in 32 bits, and its shard's as well.
LOCAL_FP32 = (
    "--bf16 --grad-reduce-in-bf16 --ddp-param-name-patterns-for-fp32-local-accumulation all"
)
ALL_FP32 = "--ddp-reduce-scatter-with-fp32-accumulation"
RAMP_UP = "--step-batch-size-schedule '0:4 128:8'"  # thresholds count tokens

ROWS = (
    Row(word=f"{AIAO}:share=1:slice-bytes=4096"),
    Row(
        word=f"{AIAO}:share=0.5",
        flags=f"{UNTIED} --optimizer sgd --no-align-grad-reduce",
        repeats=True,
    ),
    Row(word=f"{AIAO}:share=0.5", flags=f"{SP} --qk-layernorm", tp=2, dp=1, repeats=True),
    Row(word="zb-h2:step=next:share=0.5", flags="--bf16", segments=1),
    Row(word="interleaved:step=next:share=0.3"),
    Row(word=f"{AIAO}:share=0.5:wgrad=gaps:ahead=auto"),
    # DP.sync that starts between weight gradients: all, a part and nothing of it in its share.
    Row(
        word=f"{AIAO}:share=0.3:wgrad=behind@2,3:wgrad=last@1",
        flags="--ddp-bucket-size 5000",
        clip=2.2,
        whole=4,
        segments=4,
    ),
    Row(
        word=f"{AIAO}:share=0.5:wgrad=behind@0,1",
        flags=f"{SP} --calculate-per-token-loss",
        tp=2,
        dp=1,
        clip=2.2,
        whole=4,
    ),
    # Clipping: some steps are clipped, some could be, some cannot.
    Row(word=f"{AIAO}:share=0.5:slices=on", flags="", clip=2.2, whole=4),
    # The distributed optimizer: no step is clipped, and none could be; some are; the first two
    # overflow.
    Row(word=f"{AIAO}:share=0.3", flags=f"{UNTIED} {SHARDED}", clip=100, whole=1, segments=4),
    Row(word=f"{AIAO}:share=0.5:slices=on", flags=f"{SHARDED} --bf16", clip=2.2, whole=4),
    Row(word=f"{AIAO}:share=0.5", flags=f"{SHARDED} {FP16}", clip=2.8, whole=3, skipped=2),
    Row(
        word=f"{ONE}:share=0.5",
        flags=f"{SP} {SHARDED} --no-align-param-gather",
        tp=2,
        pp=1,
        segments=1,
        clip=2.2,
        whole=3,
    ),
    Row(word=f"{ONE}:share=0.5", flags=f"{SHARDED} {RAMP_UP}", pp=1, segments=1),
    # Sums of 16 bits. Stock adds up in fp32 where no chunk has more than one bucket, as with
    # untied embeddings.
    Row(word=f"{AIAO}:share=0.5", flags=LOCAL_FP32, clip=2.2, whole=4),
    Row(
        word=f"{ONE}:share=0.5:slices=on",
        flags=f"{SHARDED} {LOCAL_FP32} {ALL_FP32}",
        pp=1,
        segments=1,
        dp=4,
    ),
)


@pytest.mark.parametrize("row", marked(ROWS), ids=str)
def test_losses_norms_and_parameters_are_those_of_stock(row: Row, tmp_path: Path) -> None:
    told = compared(row, train_and_listen, tmp_path)
    stock = stock_of(row)[0].iterations

    (speaker,) = (heard for heard in told if heard.steps)
    assert speaker.steps == [(6 - row.whole, row.whole)]
    assert len(speaker.norms) == 6 - row.whole
    late = [iteration in speaker.norms for iteration in range(1, 7)]
    assert speaker.free[0] == (not (row.clip > 0 or FP16 in row.flags))
    # What had to wait ends the free iterations, and nothing else does.
    assert speaker.free[1:] == [
        was_late or (is_free and not was_free)
        for was_late, was_free, is_free in zip(late, speaker.free, speaker.free[1:], strict=False)
    ]
    assert all(was_free for was_free, was_late in zip(speaker.free, late, strict=True) if was_late)
    assert sum(float.fromhex(i["skipped"]) for i in stock) == row.skipped
    for iteration, (norm, bound) in speaker.norms.items():
        # The same squares, summed segment by segment.
        expected = float.fromhex(stock[iteration - 1]["grad norm"])
        assert norm == pytest.approx(expected, rel=1e-5)
        # Two replicas: at most sqrt(2) of their mean, with some for rounding and for copies of
        # what all tensor-parallel ranks have.
        assert not row.clip or norm <= bound <= 1.5 * norm


def read_no_flag(argv: Sequence[str]) -> int:
    """Train; return the number of steps in parts. None may read a tensor of one dimension."""
    from megatron.fold3d.runtime.grad_sync.partial_step import PartialStep

    taken, take = [], PartialStep.take

    def watched(self: PartialStep, parameters: Any) -> None:
        taken.append(self)
        with pytest.MonkeyPatch.context() as patch:
            read = torch.Tensor.item  # Adam's counts, on the host, have no dimension
            patch.setattr(torch.Tensor, "item", lambda t: read(t) if t.dim() == 0 else 1 / 0)
            take(self, parameters)

    PartialStep.take = watched  # type: ignore[method-assign]
    train(argv)
    return len(taken)


def test_a_late_step_in_fp16_does_not_wait_for_the_check_of_inf_and_nan() -> None:
    (row,) = (row for row in ROWS if FP16 in row.flags)
    assert all(run_distributed(read_no_flag, row.num_ranks, row.command(row.ours)))


def test_four_replicas_differ_from_stock_by_rounding() -> None:
    # A ring adds up an element's terms in an order that its place in the reduction decides, and
    # slices have other places than whole buckets. SGD does not blow up what that changes.
    row = Row(
        word="1f1b:step=next:share=0.5:slice-bytes=8192",
        flags="--optimizer sgd",
        pp=1,
        segments=1,
        dp=4,
    )
    check_losses(run_distributed(train, 4, row.command(row.ours)), stock_of(row))


@pytest.mark.parametrize("of", ["namespace", "optimizer"])
def test_a_norm_above_which_steps_are_skipped_is_obeyed(of: str) -> None:
    row = Row(word="1f1b:step=next:share=0.5", flags="", pp=1, segments=1)
    (ours, told), (stock, _) = (
        zip(*run_distributed(train_below_a_norm, 2, row.command(schedule), of), strict=True)
        for schedule in (row.ours, "--schedule stock")
    )
    assert differences(ours, as_known(ours, stock)) == []
    skipped = [float.fromhex(i["skipped"]) for i in stock[0].iterations]
    assert 0 < sum(skipped) < 6
    (speaker,) = (heard for heard in told if heard.steps)
    # A bound that is made from the beginning lets some steps be late.
    assert (speaker.steps == [(0, 6)]) == (of == "optimizer")


def test_an_iteration_that_is_run_again_counts_once() -> None:
    row = Row(word=f"{AIAO}:share=0.5", flags="--bf16", clip=2.2)
    assert compared(row, train_each_iteration_twice) == (12, 12, 12, 12)


def test_shares_may_change_from_one_iteration_to_the_next() -> None:
    row = Row(word=f"{AIAO}:share=0.5", flags="", clip=2.2)
    check_records(row, run_distributed(train_with_changing_shares, 4, row.command(row.ours)))


@pytest.mark.parametrize(
    ("word", "flags", "clip"),
    [
        (AIAO, "", 2.2),
        (f"{AIAO}:wgrad=last@1", f"{SHARDED} --bf16", 0),
        (f"{AIAO}:wgrad=last@1", "", 1000),  # free from the measured iteration on
    ],
)
def test_shares_that_follow_measured_times_change_no_result(
    word: str, flags: str, clip: float
) -> None:
    decided = compared(Row(word=word, flags=flags, clip=clip), train_and_decide)
    # One rank tells the shares of all four stages, and of what.
    assert [len(told) for told in decided] == [1, 0, 0, 0]
    measured, _, choice, nothing = decided[0][0].splitlines()
    assert measured.startswith("step=next measured F ")
    assert choice.split()[0] == word
    shares = r"  kept after \d+ iterations; shares of DP.sync behind a stage's backwards (.*)"
    (told,) = re.findall(shares, choice)
    assert len(told.split(", ")) == 4
    assert nothing.endswith("nothing else that fits is predicted to be faster")


@dataclass(frozen=True, slots=True)
class Heard:
    """What one rank logged of its steps."""

    norms: dict[int, tuple[float, float]]  # by iteration, with their bounds
    steps: list[tuple[int, int]]
    free: list[bool]  # by iteration, whether steps may be due at its end


def train_each_iteration_twice(argv: Sequence[str]) -> tuple[Record, int]:
    """Train; with how often an iteration was run."""
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    from megatron.fold3d.runtime.executor import Executor

    # There is a flag for it, but it spells the mode in another way than the enumeration.
    init, runs = RerunStateMachine.__init__, []

    def report(self: RerunStateMachine, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "mode": RerunMode.REPORT_DETERMINISM_STATS})

    RerunStateMachine.__init__ = report
    watch(Executor, "__call__", lambda *_, forward_only=False, **__: runs.append(not forward_only))
    return train(argv), sum(runs)


def train_below_a_norm(argv: Sequence[str], of: str) -> tuple[Record, Heard]:
    """Train with a threshold that Megatron 0.19.2 has no flag for."""
    from megatron.core.optimizer import ChainedOptimizer

    from megatron.fold3d.training import launch

    def in_namespace(parser: Any) -> None:
        parser.set_defaults(grad_norm_skip_threshold=SKIPPED_ABOVE)

    def in_optimizers(_: ChainedOptimizer, optimizers: Any) -> None:
        for optimizer in optimizers:
            optimizer.config.grad_norm_skip_threshold = SKIPPED_ABOVE

    if of == "namespace":
        watch(launch, "add_arguments", in_namespace)
    else:
        watch(ChainedOptimizer, "__init__", in_optimizers)
    return train_and_listen(argv)


def train_with_changing_shares(argv: Sequence[str]) -> Record:
    """Train with other shares of the four stages in each iteration."""
    from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps

    decide = DueSteps.decide
    every = itertools.cycle([(0.2, 0.2, 1.0, 1.0), (1.0, 1.0, 0.0, 0.0), (0.0, 0.0, 0.7, 0.4)])

    def decided(self: DueSteps, job: Any, rank: int) -> Any:
        return decide(self, replace(job, shares=next(every)), rank)

    DueSteps.decide = decided
    return train(argv)


def train_and_decide(argv: Sequence[str]) -> tuple[Record, list[str]]:
    """Train with shares that follow measured times; with what is told of them."""
    told = heard("megatron.fold3d.runtime.auto_schedule")
    return train(argv), told


def train_and_listen(argv: Sequence[str], traced: Path | None = None) -> tuple[Record, Heard]:
    """Train; with the norms that are logged later than the iteration's line, and the steps.

    With a folder for traces, also check that the rank starts what its plan says.
    """
    from megatron.fold3d.runtime.grad_sync import due_steps

    free: list[bool] = []
    watch(due_steps.DueSteps, "step", lambda due, *_, **__: free.append(due.is_free))
    said = heard(due_steps.__name__)
    record = train_as_planned(argv, traced) if traced else train(argv)
    norms = {int(f[1]): (float(f[2]), float(f[3] or "nan")) for f in map(NORM.fullmatch, said) if f}
    steps = [(int(f[1]), int(f[2])) for f in map(STEPS.fullmatch, said) if f]
    return record, Heard(norms, steps, free)
