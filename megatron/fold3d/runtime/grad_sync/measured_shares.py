"""``--backward-share auto``: shares of DP.sync from measured times.

Every few iterations, one iteration is measured on the device's own clock: when each segment's
gradients are complete, and how long the network takes per byte while it overlaps the backward. If
these times have changed, the shares are decided anew two iterations later. By then all slices of
the measured iteration have completed.

Keeps one invariant: all replicas of a stage decide in the same iteration, from the same numbers.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.fold3d.policy.backward_shares import backward_shares, busy_s
from megatron.fold3d.runtime.device import Clock, Mark, synchronize
from megatron.fold3d.runtime.grad_sync.bucket_groups import connect, ranks_of
from megatron.fold3d.runtime.trace.recorder import WARM_UP, no_end

logger = logging.getLogger(__name__)

EVERY = 50  # iterations from one that is measured to the next
DRIFT = 0.1  # change of a time, relative to the longest, above which shares are decided anew


@dataclass(frozen=True, slots=True)
class Times:
    """An iteration's times by segment; each is the slowest replica's."""

    ready_s: tuple[float, ...]
    """When a segment's gradients are complete, relative to the last segment's: zero or less."""
    sync_s: tuple[float, ...]
    """How long the network is busy with a segment's gradients."""

    def shares(self) -> tuple[float, ...]:
        """Return the share of each segment's DP.sync that the backward hides."""
        return backward_shares(self.ready_s, self.sync_s)

    def change(self, before: "Times") -> float:
        """Return the largest change of any time, relative to the longest one in ``before``."""
        now, then = (*self.ready_s, *self.sync_s), (*before.ready_s, *before.sync_s)
        longest = max(map(abs, then))
        change = max(abs(a - b) for a, b in zip(now, then, strict=True))
        return change / longest if longest else change

    def __str__(self) -> str:
        ready, sync = (", ".join(f"{t:.4g}" for t in ts) for ts in (self.ready_s, self.sync_s))
        return f"gradients ready at {ready} s, DP.sync of {sync} s"


@dataclass(slots=True)
class _Transfer:
    num_bytes: int
    start: Mark
    end: Mark | None = None


@dataclass(slots=True)
class _Measured:
    """An iteration that is being measured, or whose times have not been read yet."""

    iteration: int
    ready: dict[int, Mark] = field(default_factory=dict)
    segment_bytes: dict[int, int] = field(default_factory=dict)
    transfers: list[_Transfer] = field(default_factory=list)

    def per_byte_s(self, clock: Clock) -> float:
        """Return the network's busy time per byte while the backward runs.

        During the next forward the network carries more of the pipeline's transfers. So slices that
        ended there count only if none ended earlier. The result is infinite if an end is unknown.
        """
        ended = [(t.start, t.end, t.num_bytes) for t in self.transfers if t.end is not None]
        if len(ended) < len(self.transfers):
            return math.inf
        marks = list(self.ready.values())  # in the order of the backward
        if not marks:
            return 0.0
        spans = [
            (clock.seconds(marks[0], start), clock.seconds(marks[0], end), num_bytes)
            for start, end, num_bytes in ended
        ]
        last_s = clock.seconds(marks[0], marks[-1])
        behind = [span for span in spans if span[1] <= last_s] or spans
        num_bytes = sum(num_bytes for *_, num_bytes in behind)
        return busy_s((start_s, end_s) for start_s, end_s, _ in behind) / max(1, num_bytes)


class AutoShares:
    """Decides the shares of one rank's segments from measured times, over all iterations."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._num_segments = 0
        self._iteration = 0
        self._now: _Measured | None = None  # what happens now belongs to it
        self._last: _Measured | None = None
        self._decided: Times | None = None
        self._clock: Clock
        self._device: torch.device
        self._replicas: dist.ProcessGroup

    def connect(self, num_segments: int, replicas: dist.ProcessGroup, device: torch.device) -> None:
        """Make the replicas' process group; all ranks of the job call this together."""
        self._num_segments = num_segments
        self._replicas = connect([replicas], device, self._timeout)[ranks_of(replicas)]
        self._device, self._clock = device, Clock(device)

    def begin_iteration(self) -> tuple[float, ...] | None:
        """Begin an iteration; return new shares, or None if they stay as they are."""
        self._iteration += 1
        self._now, shares = None, None
        if self._last is not None and self._iteration == self._last.iteration + 2:
            shares = self._decide(self._last)
        since = self._iteration - WARM_UP - 1
        if since >= 0 and since % EVERY == 0:
            self._now = self._last = _Measured(self._iteration)
        return shares

    def ready(self, segment: int, num_bytes: int) -> None:
        """Note that gradients of a segment are complete; the first of them count as its time."""
        if self._now is not None:
            if segment not in self._now.ready:
                self._now.ready[segment] = self._clock.mark()
                self._now.segment_bytes[segment] = 0
            self._now.segment_bytes[segment] += num_bytes

    def open_transfer(self, num_bytes: int) -> Callable[[], None]:
        """Note that a reduction starts; call the returned function when it is done."""
        if self._now is None:
            return no_end
        transfer = _Transfer(num_bytes, self._clock.mark())
        self._now.transfers.append(transfer)

        def end() -> None:
            transfer.end = self._clock.mark()

        return end

    def _decide(self, measured: _Measured) -> tuple[float, ...] | None:
        synchronize(self._device)  # once in many iterations
        segments = sorted(measured.ready)
        times = self._agreed(measured, segments)
        if times is None:
            return None
        change = math.inf if self._decided is None else times.change(self._decided)
        if change <= DRIFT:
            logger.debug("shares of DP.sync stay, times changed by %.0f %%", 100 * change)
            return None
        self._decided = times
        of_segment = dict(zip(segments, times.shares(), strict=True))
        shares = tuple(of_segment.get(segment, 0.0) for segment in range(self._num_segments))
        if self._replicas.rank() == 0:
            why = "the first measured" if change == math.inf else f"changed by {100 * change:.0f} %"
            logger.info(
                "shares of DP.sync behind backward on rank %s, from iteration %s of this run: %s; "
                "times of iteration %s, %s: %s",
                dist.get_rank(),
                self._iteration,
                ", ".join(f"{share:.2f}" for share in shares),
                measured.iteration,
                why,
                times,
            )
        return shares

    def _agreed(self, measured: _Measured, segments: Sequence[int]) -> Times | None:
        """Return the slowest replica's times, or None if some replica's are unknown."""
        marks = list(measured.ready.values())  # in the order of the backward
        ready_s = [0.0 - self._clock.seconds(measured.ready[s], marks[-1]) for s in segments]
        per_byte_s = measured.per_byte_s(self._clock)
        found = torch.tensor([*ready_s, per_byte_s], dtype=torch.float64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._replicas)
        *ready_s, per_byte_s = found.tolist()
        if not segments or not math.isfinite(per_byte_s):
            return None
        return Times(
            tuple(ready_s), tuple(measured.segment_bytes[s] * per_byte_s for s in segments)
        )
