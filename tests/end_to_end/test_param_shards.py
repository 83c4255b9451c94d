"""``--shard-segments`` trains what stock does, with freed parameters and gradients made unusable.

Storage that is allocated again is filled with NaN before this replica's shard is put back, so a
parameter that is read before its all-gather has ended makes every result NaN, and so does a
gradient that another replica has the sum of.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from megatron.fold3d.observe.trace_files import RankTrace
from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.memory import peak_resident
from megatron.fold3d.plan.ops import GATHER_OPS
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.runtime.feature import Feature, Handler, Iteration
from megatron.fold3d.runtime.shard_buffers import ShardBuffers
from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import (
    BUCKETS,
    DROPOUT,
    EXPERTS,
    FULL,
    ONE_GROUP,
    OVERLAP,
    SELECTIVE,
    UNTIED,
    Row,
    check,
)
from tests.end_to_end.training import Record, train, train_as_planned, watch
from tests.plans import planned

pytestmark = pytest.mark.gloo

MORE_AND_MORE = (  # 2, 4 and 4 micro-batches
    "--step-batch-size-schedule '0:4 64:8' --train-samples 20 --lr-decay-samples 40 "
    "--eval-global-batch-size 4"
)
ALL_SKIPPED = f"--fp16 --initial-loss-scale {1 << 30} --eval-interval 9"  # so no hook gathers
OF_GRADIENTS = "--shard-segments gradients"
GRADIENTS = f"aiao {OF_GRADIENTS}"

# One segment on one rank, whose gradients are freed before layer norms' are summed over tp ranks.
FREED_EARLY = "0ALL_GATHER 0F0 0B0 0F1 0B1 0FREE_PARAM_B 0REDUCE_SCATTER 0FREE_GRAD 0STEP"

ROWS = (
    Row(
        f"aiao:recompute=early {OF_GRADIENTS}",
        f"{OVERLAP} --bf16 {BUCKETS} {FULL} uniform {UNTIED}",
        dp=2,
        segments=4,
        m=3,
        stock=ONE_GROUP,
    ),
    Row(
        f"aiao:wgrad=last@1,2 {OF_GRADIENTS}",
        f"{OVERLAP} --bf16 --no-align-param-gather",
        dp=2,
        segments=4,
        m=3,
        stock=ONE_GROUP,
    ),
    Row(
        "plan=PLAN --shard-segments gradients",
        f"{OVERLAP} --sequence-parallel {SELECTIVE} {DROPOUT} --calculate-per-token-loss",
        dp=2,
        tp=2,
        pp=1,
        m=2,
        plan=FREED_EARLY,
        segments=1,
    ),
    Row("interleaved --shard-segments weights --offload-activations on", OVERLAP, dp=2, m=2),
    Row(GRADIENTS, f"{OVERLAP} {EXPERTS}", dp=2, segments=4, m=2, stock=ONE_GROUP),
    Row(
        f"{GRADIENTS} --offload-activations on",
        f"{OVERLAP} {FULL} uniform {MORE_AND_MORE}",
        dp=2,
        segments=4,
    ),
    Row(f"aiao:step=next:share=1 {OF_GRADIENTS}", f"{OVERLAP} {MORE_AND_MORE}", dp=2, segments=4),
    Row(GRADIENTS, f"{OVERLAP} {ALL_SKIPPED}", dp=2, segments=2, m=2, stock=ONE_GROUP),
    Row(f"{GRADIENTS} --preemptive-comm", OVERLAP, dp=2, segments=4, m=3, stock=ONE_GROUP),
)


def train_poisoned(argv: Sequence[str], traced: Path | None = None) -> Record:
    """Train with storage that is NaN when it is allocated again; see `train_as_planned`."""

    def poison(_: None, buffers: ShardBuffers, segment: int) -> None:
        for buffer in buffers._buffers(segment):
            buffer.fill_(float("nan"))

    watch(ShardBuffers, "_allocate", after=poison)
    return train_as_planned(argv, traced) if traced else train(argv)


@dataclass
class Counted:
    """What a rank held and sent, in bytes.

    Attributes:
        parameters: of each segment, whole.
        gradients: likewise.
        resident: the most of both at once, of each iteration, its optimizer step aside.
        sent: what all-gathers and reduce-scatters delivered or took, of each iteration.
        alive: all tensors behind each iteration.
    """

    parameters: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)


def count(argv: Sequence[str]) -> Counted:
    """Train, and count what parameters and gradients take behind each action."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    from megatron.fold3d.runtime import executor

    counted = Counted()
    make_table = executor._table

    def add(whole: torch.Tensor) -> None:
        if counted.sent:
            counted.sent[-1] += whole.nbytes

    def table(features: Sequence[Feature], iteration: Iteration) -> dict[Op, Handler]:
        of_run = make_table(features, iteration)
        if not iteration.trains:
            return of_run
        ddp = [buffer for chunk in iteration.chunks for buffer in chunk.buffers]
        whole = [buffer.param_data for buffer in ddp], [buffer.grad_data for buffer in ddp]
        counted.parameters, counted.gradients = ([b.nbytes for b in kind] for kind in whole)
        counted.resident.append(0)
        counted.sent.append(0)
        counted.alive.append(_alive())

        def watched(act: Handler) -> Handler:
            def run(action: Action) -> None:
                act(action)
                shards = [
                    shard.nbytes
                    for feature in features
                    if isinstance(feature, ShardBuffers)
                    for kept in feature._kept.values()
                    for shard in kept
                ]
                now = sum(b.untyped_storage().size() for kind in whole for b in kind) + sum(shards)
                counted.resident[-1] = max(counted.resident[-1], now)

            return run

        return {op: watched(act) for op, act in of_run.items()}

    executor._table = table
    watch(buffers, "dist_all_gather_func", lambda whole, *_, **__: add(whole))
    watch(buffers, "dist_reduce_scatter_func", lambda _, whole, **__: add(whole))
    train(argv)
    return counted


_SCALAR_BYTES = 8


def _alive() -> int:
    """Return the bytes of all storages that this process can reach, those of scalars aside.

    A thread of gloo may hold the scalar that it has reduced last a little longer than its caller.
    """
    gc.collect()
    tensors = (each for each in gc.get_objects() if isinstance(each, torch.Tensor))
    storages = (each.untyped_storage() for each in tensors)
    return sum({s._cdata: s.size() for s in storages if s.size() > _SCALAR_BYTES}.values())


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_it_trains_what_stock_does_and_reads_nothing_that_is_freed(
    row: Row, tmp_path: Path
) -> None:
    check(replace(row, trains=train_poisoned), tmp_path)


BYTES = Row(dp=2, segments=4, m=2, flags=f"{OVERLAP} --bf16 {UNTIED} --train-iters 3")


@pytest.mark.parametrize(
    ("mode", "deferred", "most_resident"),  # of 2 bytes of parameters and 4 of gradients
    [("weights", False, 0.93), ("gradients", False, 0.75), ("gradients", True, 0.9)],
)
def test_bytes_are_those_that_the_plan_predicts(
    mode: str, deferred: bool, most_resident: float, tmp_path: Path
) -> None:
    row = BYTES
    order = build("aiao", num_ranks=2, num_segments=4, num_microbatches=2)
    parts = "step=next" if deferred else ""
    plan = planned(order, parts, shards=mode)
    # The optimizer's state is made in the first step, and so in the second iteration.
    late = "--schedule aiao:step=next:share=1 --clip-grad 0 --train-iters 4" if deferred else ""
    traced = f"--trace {tmp_path} --trace-iterations 2"
    argv = row.command(f"--schedule aiao --shard-segments {mode} {traced} {late}")
    for number, found in enumerate(run_distributed(count, row.num_ranks, argv)):
        rank = number // 2
        stages = range(rank, plan.num_stages, 2)
        parameters = dict(zip(stages, found.parameters, strict=True))
        gradients = dict(zip(stages, found.gradients, strict=True))
        predicted = peak_resident(plan.programs[rank], parameters, gradients, replicas=2)
        whole = sum(found.parameters) + sum(found.gradients)
        assert found.resident == [predicted] * (4 if deferred else 3)
        assert predicted <= most_resident * whole
        size_of = dict.fromkeys(GATHER_OPS, parameters) | {Op.REDUCE_SCATTER: gradients}
        sent = sum(size_of[op][s] for s, op, _ in plan.programs[rank] if op in size_of)
        if not deferred:  # those are not DDP's; behind the third, evaluation gathers as well
            assert found.sent[1] == sent <= 1.34 * whole
        grown = found.alive[-1] - found.alive[-2]
        assert grown == 0 or (deferred and grown < 0)  # its second step lets go of some scratch
    for file in tmp_path.iterdir():
        trace = RankTrace.from_json(file.read_text())
        events = {e.name for e in trace.iterations[0].events if e.kind == "param_gather"}
        gathers = {str(a) for a in plan.programs[trace.pp_rank] if a.op in GATHER_OPS}
        assert events == gathers
