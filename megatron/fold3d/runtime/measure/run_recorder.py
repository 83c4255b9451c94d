"""What a run's own iterations take: everything that a run chooses by itself is measured here.

Actions are timed on the device's own clock. Ranks then exchange what they found and measure their
lanes, so that all of them have the same numbers.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.memory import HeldSizes
from megatron.fold3d.plan.ops import BACK, COMPUTE_OPS, FORTH, PART_OPS, TABLE
from megatron.fold3d.policy.grad_sync_cuts import rings_are_buffered
from megatron.fold3d.policy.measured_times import MeasuredTimes, usable_bytes
from megatron.fold3d.runtime.agreement import gathered
from megatron.fold3d.runtime.device import (
    Mark,
    free_device_bytes,
    held_device_bytes,
    mark_now,
    synchronize,
)
from megatron.fold3d.runtime.feature import Handler, Handlers, Iteration
from megatron.fold3d.runtime.measure import lanes
from megatron.fold3d.runtime.measure.saved_bytes import left_bytes

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.coded_sums import CodedSums
    from megatron.fold3d.runtime.grad_sync.delta_gather import DeltaGather

_COSTS = {op: TABLE[op].cost for op in COMPUTE_OPS - PART_OPS}

_Sizes = Mapping[str, Mapping[int, float]]
"""Seconds and bytes by name, and then by stage or segment; the largest of all ranks count."""


class RunRecorder:
    """Measures one rank, and agrees with the others on all that they found.

    Args:
        delta: knows what is gathered of parameters, if they are coded.
        sums: knows what is sent of gradients, if they are coded.

    Attributes:
        step_s: the seconds of an optimizer step, zero if none was measured.
    """

    def __init__(
        self,
        device: torch.device,
        delta: "DeltaGather | None" = None,
        sums: "CodedSums | None" = None,
    ) -> None:
        self._device, self._delta, self._sums = device, delta, sums
        self._spans: list[tuple[Action, Mark, Mark]] = []
        self._left: defaultdict[Op, dict[int, float]] = defaultdict(dict)
        self.step_s = 0.0

    def clear(self) -> None:
        """Forget what was measured so far."""
        self._spans.clear()
        self._left.clear()
        self.step_s = 0.0

    def open_span(self, action: Action) -> Callable[[], None]:
        """Begin to time an action on the current stream; call the returned function at its end."""
        start = mark_now(self._device)
        return lambda: self._spans.append((action, start, mark_now(self._device)))

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return handlers that measure the computations of an iteration."""
        counts = held_device_bytes(self._device) is not None  # else hooks would take time

        def measured(run: Handler) -> Handler:
            def timed(action: Action) -> None:
                end = self.open_span(action)
                run(action)
                end()

            def counted(action: Action) -> None:
                of_op, left = self._left[action.op], left_bytes(lambda: timed(action), iteration)
                of_op[action.stage] = max(left, of_op.get(action.stage, left))

            return counted if counts else timed

        return {op: measured(inner[op]) for op in COMPUTE_OPS}

    def means_s(self, *ops: Op) -> tuple[float, ...] | None:
        """Return the mean times of ops; None if one is missing, or if an action has not ended."""
        if any(end.passed_s is None for _, _, end in self._spans):
            return None
        times = [[s for each in self._times_s(op).values() for s in each] for op in ops]
        return tuple(map(fmean, times)) if all(times) else None

    def agreed(self, iteration: Iteration) -> MeasuredTimes:
        """Return what all ranks found; they call this together, behind the measured iteration.

        The slowest replica of a stage counts, and the fullest rank.
        """
        synchronize(self._device)
        everyones = gathered(self._found(iteration))
        ranks, sizes, steps_s_per_byte, spares = zip(*everyones, strict=True)
        self.clear()

        def largest(name: str, count: int = iteration.plan.num_stages) -> tuple[float, ...]:
            found = [its[name] for its in sizes]
            return tuple(max(0.0, *(each.get(i, 0.0) for each in found)) for i in range(count))

        gradient_bytes = largest("gradient_bytes")
        step_s_per_byte = min(steps_s_per_byte)  # it waited for none
        groups, sync_bytes = iteration.groups, int(max(gradient_bytes))
        of_lanes = {
            "PP.sync": lanes.transfers(iteration.pp_group, iteration.hidden_bytes, self._device),
            "DP.sync": lanes.all_reduces(groups.dp_cp, sync_bytes, self._device),
            "gathers": lanes.gathers(groups.dp_cp, sync_bytes, self._device),
            "TP.sync": lanes.all_reduces(groups.tp, iteration.hidden_bytes, self._device),
        }
        message, grad_sync, gather, _ = of_lanes.values()
        free_bytes = [(r, free) for r, free in zip(ranks, spares, strict=True) if free is not None]
        held = None
        if free_bytes:
            held = HeldSizes(saved=largest("saved"), delayed=largest("delayed"), most=())
            most = (
                peak + usable_bytes(min(free for its, free in free_bytes if its == rank))
                for rank, peak in enumerate(held.peaks(iteration.plan))
            )
            held = replace(held, most=tuple(most))
        return MeasuredTimes(
            **{cost: largest(cost) for cost in _COSTS.values()},
            optimizer_s=tuple(size * step_s_per_byte for size in gradient_bytes),
            transfer_s=message.s_per_byte * iteration.hidden_bytes,
            transfer_latency_s=message.latency_s,
            grad_sync_s=tuple(map(grad_sync.seconds, gradient_bytes)),
            param_gather_s=tuple(map(gather.seconds, largest("parameter_bytes"))),
            sum_shares=largest("sum_share") if self._sums is not None else (),
            lanes=of_lanes,
            rings_are_buffered=rings_are_buffered(
                iteration.hidden_bytes, dist.get_backend(iteration.groups.dp_cp)
            ),
            held=held,
            room_bytes=usable_bytes(min((free for _, free in free_bytes), default=inf)),
            other_shard_bytes=largest("other_shard_bytes", len(iteration.chunks)),
        )

    def _times_s(self, op: Op) -> Mapping[int, Sequence[float]]:
        """Return the times of an op's actions by stage; the device must have passed them."""
        times: defaultdict[int, list[float]] = defaultdict(list)
        for action, start, end in self._spans:
            if action.op is op:
                times[action.stage].append(end.after_s(start))
        return times

    def _found(self, iteration: Iteration) -> tuple[int, _Sizes, float, int | None]:
        """Return the pipeline rank, its sizes, a step's seconds per byte, and the free memory."""
        saved = self._left[FORTH.compute]
        sizes: dict[str, dict[int, float]] = {
            cost: {stage: median(times) for stage, times in self._times_s(op).items()}
            for op, cost in _COSTS.items()
        }
        sizes["saved"] = saved
        sizes["delayed"] = {s: saved[s] + more for s, more in self._left[BACK.compute].items()}
        sizes |= {"gradient_bytes": {}, "parameter_bytes": {}, "other_shard_bytes": {}}
        sizes["sum_share"] = {}
        others = 1 - 1 / iteration.groups.dp_cp.size()
        for segment, chunk in enumerate(iteration.chunks):
            stage = segment * iteration.plan.num_ranks + iteration.rank
            trained: list[Any] = [p for p in chunk.parameters() if p.requires_grad]
            sizes["gradient_bytes"][stage] = sum(p.main_grad.nbytes for p in trained)
            coded = self._delta.link_bytes(chunk) if self._delta is not None else None
            if self._sums is not None:
                sizes["sum_share"][stage] = self._sums.share(chunk)
            whole = sum(p.nbytes for p in trained)
            sizes["parameter_bytes"][stage] = whole if coded is None else coded
            sizes["other_shard_bytes"][segment] = others * sum(
                p.numel() * (8 if p.dtype == torch.float32 else 12) for p in chunk.parameters()
            )
        num_bytes = max(1.0, sum(sizes["gradient_bytes"].values()))
        step_s_per_byte = self.step_s / num_bytes  # of gradients; zero if it is not measured
        return iteration.rank, sizes, step_s_per_byte, free_device_bytes(self._device)
