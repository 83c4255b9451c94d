"""Offloaded activations come back as they were: one table against stock, bit for bit."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.passes.offload import OffloadChoice, add_offload
from megatron.fold3d.plan.passes.transfers import RECEIVES_AHEAD
from megatron.fold3d.plan.schedules import build
from tests.distributed import RankError, run_distributed
from tests.end_to_end.test_equal_to_stock import EXPERTS, FULL, SELECTIVE, TWO_LAYERS, Row, compared
from tests.end_to_end.training import Record, train, watch

pytestmark = pytest.mark.gloo

ON = "--offload-activations on"
AUTO = "--offload-activations auto"
LAZY = "--lazy-inter-segment"
FULL_UNIFORM = f"{FULL} uniform"
# Micro-batches: 2, 4, 4, 6, 6; thresholds count tokens.
RAMP_UP = (
    "--step-batch-size-schedule '0:2 32:4 112:6' --train-samples 22 --lr-decay-samples 40 "
    "--eval-global-batch-size 4"
)

# Recomputation is of ours alone: it gives stock's bits, as `test_equal_to_stock` shows.
ROW = Row(f"aiao {ON}", TWO_LAYERS, m=6)
DEEP = Row(f"aiao {FULL_UNIFORM} {ON} {LAZY}", f"{TWO_LAYERS} --bf16", segments=4)
ROWS = (
    ROW,
    replace(ROW, word=f"afab {SELECTIVE} {ON}"),
    replace(ROW, word=f"aiao {FULL_UNIFORM} {AUTO}"),
    replace(ROW, word=f"aiao {LAZY}"),
    DEEP,
    Row(f"aiao {SELECTIVE} {ON} {LAZY}", f"{TWO_LAYERS} --sequence-parallel", tp=2),
    replace(ROW, word=f"aiao {ON} {LAZY}", flags=f"{TWO_LAYERS} {RAMP_UP}"),
    replace(
        ROW,
        word=f"breadth-first {FULL_UNIFORM} {ON} {LAZY}",
        flags=f"{TWO_LAYERS} {EXPERTS} --fp16 --initial-loss-scale 65536",
    ),
)


def peaks(row: Row, depth: int) -> tuple[int, ...]:
    """What the verifier expects on the device, by pipeline rank."""
    schedule, *_ = row.word.split()
    order = build(schedule, num_ranks=row.pp, num_segments=row.segments, num_microbatches=row.m)
    # A CPU has no memory of its own that would be short: `auto` lets all stay in the end.
    plan = add_offload(order, depth=depth) if ON in row.word else order
    return peak_activations(plan, depth=depth)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_losses_norms_and_parameters_are_those_of_stock(row: Row) -> None:
    depth = 2 if row is DEEP else 1  # computations that a copy has, from the third iteration on
    for rank, counts in enumerate(compared(row, train_and_count, depth)):
        assert counts.peak == peaks(row, depth)[rank // row.tp]
        assert (counts.sent_lazily > 0) == (LAZY in row.word)
        # Beside the one that is needed next; else up to m - p + 1 of them wait on the device.
        # Without a GPU they are posted further ahead.
        more = RECEIVES_AHEAD - 1
        assert counts.arriving <= (2 if LAZY in row.word else row.m) + more
        if "--offload-activations" not in row.word:
            continue
        # What the first iteration's memory leaves over is no slot.
        assert counts.pool_bytes - counts.high_water_bytes < counts.largest_bytes
        # The pool grows between iterations, if at all.
        assert counts.growths[0][0] == 0
        for (_, began), (ended, _) in itertools.pairwise(counts.growths):
            assert began == ended
        assert counts.growths[-2][0] == counts.growths[-1][0]
        # One launch for all that leaves together, and one back: no stage saves more than a batch.
        assert counts.calls == 2 * counts.reloads
        assert counts.tensors >= counts.calls or AUTO in row.word


@pytest.mark.parametrize("recompute", [FULL_UNIFORM, ""], ids=["full", "none"])
def test_a_host_without_the_memory_is_told_before_training(recompute: str) -> None:
    huge = "--micro-batch-size 1000000000 --global-batch-size 6000000000"
    argv = ROW.command(f"{ROW.ours} {recompute} {huge}")
    with pytest.raises(RankError, match=r"HostMemoryError: [0-9,]+ bytes of host memory for the"):
        run_distributed(train, ROW.num_ranks, argv)


@dataclass(slots=True)
class Counts:
    """What a rank moved and held.

    Attributes:
        growths: how often the pool had grown before and after the begin of each iteration, and at
            the end of the last.
        peak: the most activations on the device in the last iteration.
        arriving: the most receives of tensors that were posted on the device and not used yet.
    """

    growths: list[list[int]]
    peak: int = 0
    arriving: int = 0
    pool_bytes: int = 0
    high_water_bytes: int = 0
    largest_bytes: int = 0
    reloads: int = 0
    tensors: int = 0
    calls: int = 0
    sent_lazily: int = 0


def train_and_count(argv: Sequence[str], depth: int) -> tuple[Record, Counts]:
    """Train; with what was moved."""
    from megatron.fold3d.policy.offload_choice import choose_offload
    from megatron.fold3d.runtime.executor import Executor
    from megatron.fold3d.runtime.feature import Iteration
    from megatron.fold3d.runtime.offload import offloader
    from megatron.fold3d.runtime.offload.offloader import Offloader
    from megatron.fold3d.runtime.transfers.host_link import HostLink
    from megatron.fold3d.runtime.transfers.p2p import P2P

    def chosen(*args: Any, **options: Any) -> OffloadChoice:
        return replace(choose_offload(*args, **options), depth=depth)  # a CPU's copies have one

    offloader.choose_offload = chosen

    counts = Counts([])
    offloaders: list[Offloader] = []

    def begin(_: Executor, *, forward_only: bool = False, **__: Any) -> None:
        if not forward_only:
            counts.peak = 0

    def count_saved(_: None, iteration: Iteration, __: Action) -> None:
        counts.peak = max(counts.peak, len(iteration.saved))

    def count_arriving(_: None, transfers: P2P, *__: Any) -> None:
        counts.arriving = max(counts.arriving, len(transfers._arriving))

    def count_sent(*_: Any) -> None:
        counts.sent_lazily += 1

    def count_growths(each: Offloader, _: Any) -> None:
        offloaders.append(each)
        counts.growths.append([each.pool.num_growths])

    def count_growths_since(_: None, each: Offloader, __: Any) -> None:
        counts.growths[-1].append(each.pool.num_growths)

    watch(Executor, "__call__", begin)
    watch(Iteration, "forward", after=count_saved)
    watch(P2P, "post", after=count_arriving)
    watch(HostLink, "send", count_sent)
    watch(Offloader, "prepare", count_growths, after=count_growths_since)
    record = train(argv)
    for each in offloaders[:1]:
        counts.growths.append([each.pool.num_growths] * 2)
        counts.peak = each.peak
        counts.pool_bytes, counts.high_water_bytes = each.pool.num_bytes, each.pool.high_water_bytes
        counts.largest_bytes = each._slots.activation_bytes
        counts.reloads = each.num_reloads
        counts.tensors, counts.calls = each.copies.num_tensors, each.copies.num_calls
    return record, counts
