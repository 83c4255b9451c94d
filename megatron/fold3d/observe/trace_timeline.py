"""The timeline of a traced run, from the traces of its ranks.

A rank alone cannot know how long a message took, since this needs the clocks of two ranks. This
module combines the ranks, so that a measured run and a simulated one have the same type.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

from megatron.fold3d.observe.messages import message_to, send_of, source_of
from megatron.fold3d.observe.timeline import BUSY_LANES, Lane, Span, Timeline
from megatron.fold3d.observe.trace_files import LANES, Event, IterationTrace, RankTrace
from megatron.fold3d.plan.ir import Action, PlanError, gc_paused
from megatron.fold3d.plan.ops import SYNC_OPS


@gc_paused()
def to_timeline(ranks: Sequence[RankTrace]) -> Timeline:
    """Return the timeline of one pipeline over the iterations that all of its ranks recorded.

    Time zero is the start of the first one. Iterations are numbered from zero, as in a simulation.

    Raises:
        ValueError: there is no such iteration.
    """
    common = set.intersection(*({row.iteration for row in rank.iterations} for rank in ranks))
    if not common:
        raise ValueError("found no iteration that all ranks recorded; trace again")
    recorded = [[row for row in rank.iterations if row.iteration in common] for rank in ranks]
    began_s = recorded[0][0].start_s
    recorded = [[replace(row, start_s=row.start_s - began_s) for row in rows] for rows in recorded]
    messages = [list(_messages(recorded, rank)) for rank in range(len(ranks))]
    offsets_s = _offsets(messages)
    start_s = min(rows[0].start_s + offsets_s[rank] for rank, rows in enumerate(recorded))
    offsets_s = [offset_s - start_s for offset_s in offsets_s]
    timeline = Timeline.of(
        [
            *(s for n, row in enumerate(rows) for s in spans_of(row, n, row.start_s + offset_s)),
            *(message.span(offsets_s[message.sender], offset_s) for message in received),
        ]
        for rows, received, offset_s in zip(recorded, messages, offsets_s, strict=True)
    )
    if (found := timeline.num_segments) > ranks[0].num_segments:
        raise ValueError(
            f"found actions of {found} segments in a trace of {ranks[0].num_segments}; trace again"
        )
    return timeline


def spans_of(row: IterationTrace, number: int = 0, zero_s: float = 0.0) -> Iterator[Span]:
    """Yield the spans of an iteration that need only one rank's clock: all but messages.

    A span inside another one interrupts it.

    Args:
        number: its number among those that are shown.
    """
    events = sorted(_in_turns(row.events), key=lambda event: (event.start_s, -event.end_s))
    shown = [(e, _action(e.name)) for e in events if e.kind != "p2p" and not _is_gap(e)]
    busy = [event for event, _ in shown if LANES[event.kind] in BUSY_LANES]
    position = 0
    for event, action in shown:
        lane, pieces = LANES[event.kind], [(event.start_s, event.end_s)]
        if lane in BUSY_LANES:
            position += 1
            pieces = list(_pieces(event, busy, position))
        for start_s, end_s in pieces:
            yield Span(lane, zero_s + start_s, zero_s + end_s, action, number)


def _times(row: IterationTrace) -> Mapping[Action, tuple[float, float]]:
    """Return when each computation and transfer of an iteration began and ended."""
    return {
        action: (row.start_s + event.start_s, row.start_s + event.end_s)
        for event in row.events
        if event.kind in ("compute", "p2p") and (action := _action(event.name)) is not None
    }


def _found_inputs(row: IterationTrace) -> Mapping[Action, float]:
    """Return, for each computation whose message had already arrived, when the rank was free.

    The time of the arrival itself is unknown.
    """
    waits = {e.name: e.end_s - e.start_s for e in row.events if e.kind == "wait"}
    busy = [e for e in row.events if LANES[e.kind] in BUSY_LANES and not _is_gap(e)]
    work = sorted(busy, key=lambda e: e.start_s)
    return {
        action: row.start_s + before.end_s
        for before, event in pairwise(work)
        if event.kind == "compute" and (action := _action(event.name)) is not None
        if 2 * waits.get(f"wait {message_to(action)}", inf) < event.start_s - before.end_s
    }


class _Message(NamedTuple):
    """A message from its departure on the sender's clock to its arrival on the receiver's."""

    action: Action
    sender: int
    departure_s: float
    arrival_s: float
    found_s: float
    """When the receiver was free and the message was there; infinite if the receiver waited."""
    iteration: int

    def span(self, sender_s: float, receiver_s: float) -> Span:
        """Return it on one clock, from the offsets of the two."""
        start_s, end_s = self.departure_s + sender_s, self.arrival_s + receiver_s
        end_s = min(end_s, max(start_s, self.found_s + receiver_s))
        return Span(Lane.P2P, min(start_s, end_s), end_s, self.action, self.iteration)


def _messages(recorded: Sequence[Sequence[IterationTrace]], receiver: int) -> Iterator[_Message]:
    """Yield the messages that a rank received.

    Stock's schedules record no sends and receives. There a message leaves when it has been computed
    and arrives when the computation that reads it begins.
    """
    num_ranks = len(recorded)
    if num_ranks == 1:
        return
    for number, row in enumerate(recorded[receiver]):
        here, found_s = _times(row), _found_inputs(row)
        there = [_times(rows[number]) for rows in recorded]
        for action, (start_s, _) in here.items():
            if (message := message_to(action)) is None:
                continue
            source = source_of(message)
            sender = source.stage % num_ranks
            if (computed := there[sender].get(source)) is None:
                continue  # the first stage reads no message, nor does the last one's backward
            sent = there[sender].get(send_of(message))
            yield _Message(
                message,
                sender,
                departure_s=sent[0] if sent else computed[1],
                arrival_s=here[message][1] if message in here else start_s,
                found_s=found_s.get(action, inf),
                iteration=number,
            )


def _offsets(messages: Sequence[Sequence[_Message]]) -> list[float]:
    """Return each rank's clock offset, with which no message arrives before it has left.

    Clocks of one machine agree; those of several machines agree to about a millisecond. Each rank's
    clock is moved by as little as its messages with the previous rank demand.
    """
    offsets_s = [0.0] * len(messages)
    for rank in range(1, len(messages)):
        into = [m.arrival_s - m.departure_s for m in messages[rank] if m.sender == rank - 1]
        back = [m.arrival_s - m.departure_s for m in messages[rank - 1] if m.sender == rank]
        late_s, early_s = -min(into, default=0.0), min(back, default=0.0)
        moved_s = max(0.0, late_s) or min(0.0, early_s)
        offsets_s[rank] = offsets_s[rank - 1] + moved_s
    return offsets_s


def _pieces(event: Event, busy: Sequence[Event], position: int) -> Iterator[tuple[float, float]]:
    """Yield the parts of an event that no event of ``busy[position:]`` interrupts."""
    at_s = event.start_s
    while position < len(busy) and busy[position].start_s < event.end_s:
        if busy[position].start_s > at_s:
            yield at_s, busy[position].start_s
        at_s = max(at_s, busy[position].end_s)
        position += 1
    if at_s < event.end_s or at_s == event.start_s:
        yield at_s, event.end_s


def _in_turns(events: Sequence[Event]) -> Iterator[Event]:
    """Cut computations that overlap, as those of pairs do, in the middle of their overlap.

    Only one computes at a time, but a trace does not record which one.
    """
    computed = sorted((e for e in events if e.kind == "compute"), key=lambda e: e.start_s)
    cut = {id(event): event for event in computed}
    for first, second in pairwise(computed):
        if second.start_s < first.end_s <= second.end_s:
            middle_s = (second.start_s + first.end_s) / 2
            cut[id(first)] = cut[id(first)]._replace(end_s=middle_s)
            cut[id(second)] = second._replace(start_s=middle_s)
    return (cut.get(id(event), event) for event in events)


def _is_gap(event: Event) -> bool:
    """Tell whether an event is a wait whose reason has a span of its own, or is not known."""
    if event.kind != "wait":
        return False
    action = _action(event.name)
    return action is None or action.op not in SYNC_OPS


def _action(name: str) -> Action | None:
    try:
        return Action.from_str(name.removeprefix("wait "))
    except PlanError:
        return None
