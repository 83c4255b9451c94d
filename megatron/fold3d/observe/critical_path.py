"""The critical path: the chain of work and transfers that made a timeline as long as it is.

The search runs from the end backwards. The cause of a computation is whichever ended last: the
previous action on its rank, its message, or its reload. The cause of a message is the computation
that produced it; the cause of a wait for DP.sync is that DP.sync. The steps follow each other
without a gap, so their durations add up to the makespan. A step without a cause includes the idle
time before it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import inf
from operator import itemgetter
from typing import NamedTuple

from megatron.fold3d.observe.exposure import column
from megatron.fold3d.observe.messages import message_to, reload_to, source_of
from megatron.fold3d.observe.timeline import Lane, Span, Timeline
from megatron.fold3d.plan.ir import Action, gc_paused

# A measured message may have arrived before it was taken. One that left while its receiver was
# still computing did not hold it up if the receiver then idled for less than this share of that
# computation.
_SLACK = 0.1
_Found = tuple[int, Span]  # of a rank


class PathStep(NamedTuple):
    """A part of the path: from ``start_s`` on, only the end of this span delayed the path."""

    rank: int
    span: Span
    start_s: float


@gc_paused()
def critical_path(timeline: Timeline) -> tuple[PathStep, ...]:
    """Return the path to the end of the last work, in the order of time."""
    return tuple(reversed(list(_Causes(timeline).backwards())))


def path_seconds(steps: Iterable[PathStep]) -> dict[str, float]:
    """Return the seconds that the path spends on each of Table II's columns, and without cause."""
    seconds: dict[str, float] = defaultdict(float)
    for _, span, start_s in steps:
        seconds[column(span)] += span.end_s - max(start_s, span.start_s)
        seconds["idle_s"] += max(0.0, span.start_s - start_s)
    return {name: total_s for name, total_s in seconds.items() if total_s > 0}


def _is_found(message: Span, before: Span, span: Span) -> bool:
    """True if a message had arrived, or nearly arrived, when the rank needed it."""
    idle_s = span.start_s - before.end_s
    return message.start_s < before.end_s and idle_s <= _SLACK * span.duration_s


class _Causes:
    """The cause of each wait. A cause begins strictly earlier, so the search backwards ends."""

    def __init__(self, timeline: Timeline) -> None:
        self.num_ranks = timeline.num_ranks
        # Spans by their end: all of a lane under None, one action's under the action.
        self.by_end: dict[tuple[int, Lane, Action | None], list[_Found]] = defaultdict(list)
        for rank, spans in enumerate(timeline.ranks):
            for span in sorted(spans, key=lambda span: span.end_s):
                lane = Lane.COMPUTE if span.lane is Lane.OPTIMIZER else span.lane
                for action in {None, span.action}:
                    self.by_end[rank, lane, action].append((rank, span))

    def backwards(self) -> Iterator[PathStep]:
        found = self._last_anywhere(inf)
        while found is not None:
            rank, span = found
            earlier = (c for c in self._of(rank, span) if c and c[1].start_s < span.start_s)
            causes = [(min(c[1].end_s, span.start_s), c) for c in earlier]
            until_s, found = max(causes, key=itemgetter(0), default=(0.0, None))
            yield PathStep(rank, span, until_s)

    def _of(self, rank: int, span: Span) -> Iterator[_Found | None]:
        """Yield what a span may have waited for, if it began earlier."""
        if span.lane is Lane.P2P:
            yield self._source(span.action, span.end_s)
            return
        before = self._last(rank, span.start_s)
        yield before
        if span.lane is Lane.GRAD_SYNC:
            yield self._ended(rank, Lane.GRAD_SYNC, span.start_s)
        if span.lane is not Lane.COMPUTE or span.action is None:
            return
        if (read := message_to(span.action)) is not None:
            message = self._ended(rank, Lane.P2P, span.start_s, read)
            if message is None:  # it took no time, or was not recorded
                message = self._source(read, span.start_s)
            if not (before and message and _is_found(message[1], before[1], span)):
                yield message
            yield self._ended(rank, Lane.COPY, span.start_s, reload_to(span.action))

    def _last(self, rank: int, until_s: float) -> _Found | None:
        """Return the rank's last action or, if that was a wait, what it waited for."""
        work = self._ended(rank, Lane.COMPUTE, until_s)
        wait = self._ended(rank, Lane.WAIT, until_s)
        if wait is None or (work is not None and work[1].end_s > wait[1].end_s):
            return work
        if wait[1].action is None:  # at the end of an iteration, for the last rank to end it
            return self._last_anywhere(wait[1].end_s)
        return self._synced(rank, wait[1]) or work

    def _last_anywhere(self, until_s: float) -> _Found | None:
        """Return the last span of any rank; the only waits that count are those for DP.sync."""
        found = []
        for rank in range(self.num_ranks):
            found.append(self._ended(rank, Lane.COMPUTE, until_s))
            wait = self._ended(rank, Lane.WAIT, until_s)
            while wait is not None and wait[1].action is None:
                wait = self._ended(rank, Lane.WAIT, wait[1].start_s)
            found.append(self._synced(rank, wait[1]) if wait else None)
        return max((f for f in found if f), key=lambda pair: pair[1].end_s, default=None)

    def _synced(self, rank: int, wait: Span) -> _Found | None:
        """The DP.sync that a wait was for, if it was for any."""
        return wait.action and self._ended(rank, Lane.GRAD_SYNC, wait.end_s, wait.action)

    def _ended(
        self, rank: int, lane: Lane, until_s: float, action: Action | None = None
    ) -> _Found | None:
        """Return a lane's last span, or an action's, of those that have ended."""
        spans = self.by_end.get((rank, lane, action), [])
        index = bisect_right(spans, until_s, key=lambda found: found[1].end_s)
        return spans[index - 1] if index else None

    def _source(self, message: Action | None, until_s: float) -> _Found | None:
        """The computation whose result a message carries."""
        if message is None:
            return None
        source = source_of(message)
        return self._ended(source.stage % self.num_ranks, Lane.COMPUTE, until_s, source)
