"""Where an iteration's time goes: the columns of the paper's Table II, for any timeline.

Every second of a rank between the ends of two iterations is counted once, so a row's columns add
up to the iteration. If a rank idles while its message is in flight, PP.sync is exposed. If the
message has not been sent yet, the idle time is bubble, no matter what delayed the sender.
"""

from collections.abc import Iterable
from typing import NamedTuple

from megatron.fold3d.observe.messages import message_to, reload_to
from megatron.fold3d.observe.timeline import BUSY_LANES, Lane, Span, Timeline
from megatron.fold3d.observe.trace_files import IterationTrace
from megatron.fold3d.observe.trace_timeline import spans_of
from megatron.fold3d.plan.ir import Action
from megatron.fold3d.plan.ops import P2P_OPS, TABLE


class Exposure(NamedTuple):
    """Seconds of one rank in one iteration, by cause."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    bubble_s: float = 0.0
    grad_sync_s: float = 0.0
    p2p_s: float = 0.0
    copy_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The iteration."""
        return sum(self)

    @property
    def bubble_ratio(self) -> float:
        """Bubble over compute: Megatron Sec. 2.2's (p - 1) / m."""
        compute_s = self.forward_s + self.backward_s
        return self.bubble_s / compute_s if compute_s else 0.0

    def to_dict(self) -> dict[str, float]:
        """Return all seconds by name, with the total."""
        return {**self._asdict(), "total_s": self.total_s}

    def share(self, seconds: float) -> float:
        """Return seconds as part of the iteration."""
        return seconds / self.total_s if self.total_s else 0.0


def exposure(timeline: Timeline, iteration: int = -1) -> tuple[Exposure, ...]:
    """Return, for each rank, where the time of an iteration went; by default of the last one."""
    makespan_s = timeline.makespan_s
    return tuple(
        _rank_exposure(timeline, rank, iteration, makespan_s) for rank in range(timeline.num_ranks)
    )


def mean(rows: Iterable[Exposure]) -> Exposure:
    """Return the mean over ranks."""
    return Exposure(*(sum(column) / len(column) for column in zip(*rows, strict=True)))


def _rank_exposure(timeline: Timeline, rank: int, iteration: int, makespan_s: float) -> Exposure:
    ends = timeline.iteration_ends_s(rank)
    if not ends:  # nothing of its own takes time, so all of it is waiting for the others
        return Exposure(bubble_s=timeline.period_s or makespan_s)
    number = range(len(ends))[iteration]
    spans = [span for span in timeline.ranks[rank] if span.iteration == number]
    arriving = (Lane.P2P, Lane.COPY)
    arrivals = {span.action: span for span in spans if span.lane in arriving and span.action}
    seconds = dict.fromkeys(Exposure._fields, 0.0)
    free_s = ends[number - 1] if number else 0.0
    for span in (span for span in spans if span.lane in BUSY_LANES):
        if span.start_s > free_s:
            _count_gap(seconds, free_s, span, arrivals)
        seconds[column(span)] += span.duration_s
        free_s = span.end_s
    if len(ends) == 1:  # alone, an iteration lasts until its last rank is done
        seconds["bubble_s"] += makespan_s - free_s
    return Exposure(**seconds)


def column(span: Span) -> str:
    """Return the column of a span; backwards, and what belongs to them, are one."""
    if span.lane is Lane.WAIT:
        if span.action is None:
            return "bubble_s"
        return "p2p_s" if span.action.op in P2P_OPS else "grad_sync_s"
    if span.lane is not Lane.COMPUTE:
        return f"{span.lane}_s"
    forward = span.action is not None and TABLE[span.action.op].kind == "forward"
    return "forward_s" if forward else "backward_s"


def _count_gap(
    seconds: dict[str, float], free_s: float, span: Span, arrivals: dict[Action, Span]
) -> None:
    """Divide the time before a computation into its message, its reload and the bubble."""
    bubble_s, until_s = span.start_s - free_s, span.start_s
    if span.action is not None and (read := message_to(span.action)) is not None:
        waits = ((read, "p2p_s"), (reload_to(span.action), "copy_s"))
        causes = [(arrivals[action], name) for action, name in waits if action in arrivals]
        for cause, name in sorted(causes, key=lambda pair: pair[0].end_s, reverse=True):
            began_s = max(free_s, cause.start_s)
            if (exposed_s := min(until_s, cause.end_s) - began_s) > 0:
                seconds[name] += exposed_s
                bubble_s -= exposed_s
                until_s = began_s
    seconds["bubble_s"] += bubble_s


def rank_exposure(row: IterationTrace) -> dict[str, float]:
    """Return where a rank's iteration went, from its own measurements alone.

    It cannot distinguish waits for messages in flight from waits for messages that have not been
    sent yet. ``copies_s`` overlaps the rest; all other values add up to ``total_s``.
    """
    names = {"grad_sync_s": "exposed_grad_sync_s", "copy_s": "copies_s"}
    seconds = dict.fromkeys(("forward_s", "backward_s", "optimizer_s", *names.values()), 0.0)
    for span in spans_of(row):
        if span.lane in BUSY_LANES or span.lane is Lane.COPY:
            seconds[names.get(column(span), column(span))] += span.duration_s
    used_s = sum(seconds.values()) - seconds["copies_s"]
    seconds["bubble_and_exposed_p2p_s"] = max(0.0, row.end_s - used_s)
    seconds["total_s"] = row.end_s
    return seconds
