"""Offloaded activations come back as they were: one table against stock, bit for bit."""

import itertools
import shlex
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
from tests.end_to_end.test_equal_to_stock import EXPERTS, FULL, ITERATIONS, SELECTIVE
from tests.end_to_end.training import TINY, Record, differences, once, train

pytestmark = pytest.mark.gloo

MODEL = f"{TINY} --num-layers 8 --lr 1e-2 --eval-iters 1 --eval-interval 3"
ON = "--offload-activations on"
AUTO = "--offload-activations auto"
LAZY = "--lazy-inter-segment"
PP = 2
FULL_UNIFORM = f"{FULL} uniform"
# Micro-batches: 2, 4, 4, 6, 6; thresholds count tokens.
RAMP_UP = (
    "--step-batch-size-schedule '0:2 32:4 112:6' --train-samples 22 --lr-decay-samples 40 "
    "--eval-global-batch-size 4"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        flags: of both runs.
        recompute: of ours alone: recomputation gives stock's bits, as `test_equal_to_stock` shows.
        moves: what ours keeps in host memory.
        depth: computations that a copy has, from the third iteration on.
    """

    schedule: str = "aiao"
    recompute: str = ""
    moves: str = ON
    flags: str = ""
    tp: int = 1
    depth: int = 1
    segments: int = 2
    m: int = 6

    def __str__(self) -> str:
        recompute = self.recompute.split()[1] if self.recompute else "none"
        sizes = f"segments={self.segments} m={self.m} tp={self.tp}"
        return f"{self.schedule} {self.moves} recompute={recompute} {self.flags} {sizes}"

    def command(self, ours: str = "") -> tuple[str, ...]:
        layout = (
            f"--pipeline-model-parallel-size {PP} --tensor-model-parallel-size {self.tp} "
            f"--segments {self.segments}"
        )
        size = "" if "schedule" in self.flags else f"{ITERATIONS} --global-batch-size {self.m}"
        return tuple(shlex.split(f"{MODEL} {layout} {size} {self.flags} {ours}"))

    @property
    def peaks(self) -> tuple[int, ...]:
        """What the verifier expects on the device, by pipeline rank."""
        order = build(
            self.schedule,
            num_ranks=PP,
            num_segments=self.segments,
            num_microbatches=self.m,
        )
        # A CPU has no memory of its own that would be short: `auto` lets all stay in the end.
        plan = add_offload(order, depth=self.depth) if ON in self.moves else order
        return peak_activations(plan, depth=self.depth)


ROWS = (
    Row(),
    Row(recompute=SELECTIVE, schedule="afab"),
    Row(recompute=FULL_UNIFORM, moves=AUTO),
    Row(moves=LAZY),
    Row(recompute=FULL_UNIFORM, moves=f"{ON} {LAZY}", flags="--bf16", depth=2, segments=4, m=4),
    Row(recompute=SELECTIVE, moves=f"{ON} {LAZY}", flags="--sequence-parallel", tp=2, m=4),
    Row(moves=f"{ON} {LAZY}", flags=RAMP_UP),
    Row(
        recompute=FULL_UNIFORM,
        moves=f"{ON} {LAZY}",
        schedule="breadth-first",
        flags=f"{EXPERTS} --fp16 --initial-loss-scale 65536",
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_losses_norms_and_parameters_are_those_of_stock(row: Row) -> None:
    ours = f"--schedule {row.schedule} {row.recompute} {row.moves}"
    runs = run_distributed(train_and_count, PP * row.tp, row.command(ours), row.depth)

    stock = once(train, PP * row.tp, row.command("--schedule stock"))
    assert differences([record for record, _ in runs], stock) == []
    for rank, (_, counts) in enumerate(runs):
        assert counts.peak == row.peaks[rank // row.tp]
        assert (counts.sent_lazily > 0) == (LAZY in row.moves)
        # Beside the one that is needed next; else up to m - p + 1 of them wait on the device.
        # Without a GPU they are posted further ahead.
        more = RECEIVES_AHEAD - 1
        assert counts.arriving <= (2 if LAZY in row.moves else row.m) + more
        if row.moves == LAZY:
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
        assert counts.tensors >= counts.calls or row.moves == AUTO


@pytest.mark.parametrize("recompute", [FULL_UNIFORM, ""], ids=["full", "none"])
def test_a_host_without_the_memory_is_told_before_training(recompute: str) -> None:
    huge = "--micro-batch-size 1000000000 --global-batch-size 6000000000"
    argv = Row().command(f"--schedule aiao {ON} {recompute} {huge}")
    with pytest.raises(RankError, match=r"HostMemoryError: [0-9,]+ bytes of host memory for the"):
        run_distributed(train, PP, argv)


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
    from megatron.fold3d.runtime.executor import Computations, Executor
    from megatron.fold3d.runtime.offload import offloader
    from megatron.fold3d.runtime.offload.offloader import Offloader
    from megatron.fold3d.runtime.transfers.host_link import HostLink
    from megatron.fold3d.runtime.transfers.p2p import P2P

    def chosen(*args: Any, **options: Any) -> OffloadChoice:
        return replace(choose_offload(*args, **options), depth=depth)  # a CPU's copies have one

    offloader.choose_offload = chosen

    counts = Counts([])
    run, forward, post = Executor.__call__, Computations.forward, P2P.post
    prepare, send = Offloader.prepare, HostLink.send
    offloaders: list[Offloader] = []

    def counted_run(self: Executor, *, forward_only: bool = False, **kwargs: Any) -> Any:
        if not forward_only:
            counts.peak = 0
        return run(self, forward_only=forward_only, **kwargs)

    def counted_forward(self: Computations, action: Action) -> None:
        forward(self, action)
        counts.peak = max(counts.peak, len(self.iteration.saved))

    def counted_post(self: P2P, *args: Any) -> None:
        post(self, *args)
        counts.arriving = max(counts.arriving, len(self._arriving))

    def counted_prepare(self: Offloader, iteration: Any) -> None:
        before = self.pool.num_growths
        prepare(self, iteration)
        offloaders.append(self)
        counts.growths.append([before, self.pool.num_growths])

    def counted_send(self: HostLink, *args: Any) -> None:
        counts.sent_lazily += 1
        send(self, *args)

    Executor.__call__, Computations.forward, P2P.post = counted_run, counted_forward, counted_post
    Offloader.prepare, HostLink.send = counted_prepare, counted_send
    record = train(argv)
    for each in offloaders[:1]:
        counts.growths.append([each.pool.num_growths] * 2)
        counts.peak = each.peak
        counts.pool_bytes, counts.high_water_bytes = each.pool.num_bytes, each.pool.high_water_bytes
        counts.largest_bytes = each._slots.activation_bytes
        counts.reloads = each.num_reloads
        counts.tensors, counts.calls = each.copies.num_tensors, each.copies.num_calls
    return record, counts
