"""The times of a run: of one iteration's computations, of a transfer and of DP.sync.

Computations are timed on the device's own clock. Ranks then time their links and exchange all
times, so that all of them have the same numbers.
"""

import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.ops import BACK, COMPUTE_OPS, FORTH, PART_OPS, TABLE
from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes
from megatron.fold3d.policy.measured_times import MeasuredTimes
from megatron.fold3d.policy.ring_buffers import rings_are_buffered
from megatron.fold3d.runtime.device import (
    Clock,
    Mark,
    free_device_bytes,
    held_device_bytes,
    synchronize,
)
from megatron.fold3d.runtime.feature import Handler, Handlers, Iteration

logger = logging.getLogger(__name__)

_ROUNDS = 3
_SYNC_BYTES = 4 << 20


@dataclass(slots=True)
class _Found:
    """The measurements of one rank, by stage.

    Attributes:
        rank: the pipeline rank.
        times_s: the time of each stage's ops, the median over micro-batches.
        saved_bytes: the bytes that a stage's forward leaves; None on a CPU.
        delayed_bytes: the bytes that a stage's backward leaves.
        free_bytes: the bytes of the device that were never used.
    """

    rank: int
    times_s: dict[int, dict[Op, float]]
    transfer_s: float
    grad_sync_s: dict[int, float]
    saved_bytes: dict[int, int] = field(default_factory=dict)
    delayed_bytes: dict[int, int] = field(default_factory=dict)
    free_bytes: int | None = None


class RunTimes:
    """Measures one rank's times, and agrees with the others on all of them."""

    def __init__(self) -> None:
        self._marks: list[tuple[Action, Mark, Mark]] = []
        self._bytes: defaultdict[tuple[int, Op], list[int]] = defaultdict(list)

    def clear(self) -> None:
        """Forget the iteration that was measured."""
        self._marks.clear()
        self._bytes.clear()

    def agreed(self, iteration: Iteration) -> MeasuredTimes:
        """Return the times of all ranks; they call this together, behind the measured iteration."""
        times = _agreed(self._found(iteration), iteration)
        self.clear()
        if dist.get_rank() == 0:
            logger.info("the slowest stage takes %s", times)
        return times

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return handlers that time the computations of the iteration that is measured."""
        clock = Clock(iteration.device)

        def timed(run: Handler) -> Handler:
            def handler(action: Action) -> None:
                before, start = held_device_bytes(iteration.device), clock.mark()
                run(action)
                self._marks.append((action, start, clock.mark()))
                if before is not None:
                    grown = (held_device_bytes(iteration.device) or 0) - before
                    self._bytes[action.stage, action.op].append(grown)

            return handler

        return {op: timed(inner[op]) for op in COMPUTE_OPS}

    def _found(self, iteration: Iteration) -> _Found:
        device = iteration.device
        synchronize(device)  # once
        clock = Clock(device)
        spans: defaultdict[int, defaultdict[Op, list[float]]]
        spans = defaultdict(lambda: defaultdict(list))
        for action, start, end in self._marks:
            spans[action.stage][action.op].append(clock.seconds(start, end))
        found = _Found(
            rank=iteration.rank,
            times_s={
                stage: {op: median(times) for op, times in ops.items()}
                for stage, ops in spans.items()
            },
            transfer_s=_transfer_s(iteration),
            grad_sync_s=dict(zip(sorted(spans), _grad_sync_s(iteration), strict=True)),
            free_bytes=free_device_bytes(device),
        )
        for (stage, op), grown in self._bytes.items():
            if op is FORTH.compute:
                found.saved_bytes[stage] = max(0, *grown)
        for (stage, op), grown in self._bytes.items():
            if op is BACK.compute:
                found.delayed_bytes[stage] = max(0, found.saved_bytes[stage] + max(grown))
        return found


def _transfer_s(iteration: Iteration) -> float:
    """Time a message from every rank to the next, all at once: the median of a few rounds."""
    group, device = iteration.pp_group, iteration.device
    if group.size() == 1:
        return 0.0
    sent, received = (
        torch.zeros(iteration.hidden_bytes, dtype=torch.uint8, device=device) for _ in range(2)
    )
    rank, ranks = group.rank(), dist.get_process_group_ranks(group)

    def once() -> float:
        start_s = time.perf_counter()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, ranks[(rank + 1) % len(ranks)], group),
                dist.P2POp(dist.irecv, received, ranks[rank - 1], group),
            ]
        )
        for work in works:
            work.wait()
        synchronize(device)
        return time.perf_counter() - start_s

    dist.barrier(group)
    once()  # connects
    return median(once() for _ in range(_ROUNDS))


def _grad_sync_s(iteration: Iteration) -> list[float]:
    """Return the seconds of DP.sync of each chunk's gradients, from an all-reduce of some bytes."""
    group: Any = iteration.groups.dp_cp
    parameters: list[list[Any]] = [
        [p for p in chunk.parameters() if p.requires_grad] for chunk in iteration.chunks
    ]
    sizes = [sum(p.main_grad.nbytes for p in of_chunk) for of_chunk in parameters]
    if group.size() == 1:
        return [0.0] * len(sizes)
    num_bytes = min(_SYNC_BYTES, max(sizes))
    data = torch.zeros(max(1, num_bytes // 4), device=iteration.device)

    def once() -> float:
        start_s = time.perf_counter()
        dist.all_reduce(data, group=group)
        synchronize(iteration.device)
        return time.perf_counter() - start_s

    once()
    per_byte_s = median(once() for _ in range(_ROUNDS)) / (4 * data.numel())
    return [size * per_byte_s for size in sizes]


def _agreed(mine: _Found, iteration: Iteration) -> MeasuredTimes:
    """Return the slowest replica's times of each stage, and the least free memory of any rank."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    plan = iteration.plan
    stages = range(plan.num_stages)

    slowest = {
        TABLE[op].cost: tuple(
            max(found.times_s.get(stage, {}).get(op, 0.0) for found in everyones)
            for stage in stages
        )
        for op in COMPUTE_OPS - PART_OPS
    }
    return MeasuredTimes(
        **slowest,
        transfer_s=max(found.transfer_s for found in everyones),
        grad_sync_s=tuple(
            max(found.grad_sync_s.get(stage, 0.0) for found in everyones) for stage in stages
        ),
        rings_are_buffered=rings_are_buffered(
            iteration.hidden_bytes, dist.get_backend(iteration.groups.dp_cp)
        ),
        held=_held(everyones, iteration),
    )


def _held(everyones: list[_Found], iteration: Iteration) -> HeldSizes | None:
    """Return the bytes each rank may hold: those that it held when measured, plus free memory."""
    if any(found.free_bytes is None for found in everyones):
        return None
    plan, stages = iteration.plan, range(iteration.plan.num_stages)
    saved, delayed = (
        tuple(float(max(of.get(stage, 0) for of in sizes)) for stage in stages)
        for sizes in (
            [found.saved_bytes for found in everyones],
            [found.delayed_bytes for found in everyones],
        )
    )
    of_order = HeldSizes(saved=saved, delayed=delayed, most=(0.0,) * plan.num_ranks)
    return HeldSizes(
        saved=saved,
        delayed=delayed,
        most=tuple(
            peak + min(found.free_bytes or 0 for found in everyones if found.rank == rank)
            for rank, peak in enumerate(of_order.peaks(plan))
        ),
    )
