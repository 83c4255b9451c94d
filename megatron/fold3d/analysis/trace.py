"""Traces: what ``--trace DIR`` leaves behind, one JSON file per rank, and the timeline it makes.

A trace holds what a rank can know by itself, on its own clock. What takes two ranks, how long a
message was under way, is worked out here; so a measured run and a simulated one are the same type.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import NamedTuple, Self

from megatron.fold3d.analysis.messages import message_to, send_of, source_of
from megatron.fold3d.analysis.timeline import BUSY_LANES, Lane, Span, Timeline
from megatron.fold3d.plan.ir import Action, PlanError, gc_paused

VERSION = 1
_APART_S = 600.0  # no clock of a cluster is this wrong
_LANES = {
    "compute": Lane.COMPUTE,
    "optimizer": Lane.OPTIMIZER,
    "wait": Lane.WAIT,
    "grad_sync": Lane.GRAD_SYNC,
    "param_gather": Lane.GRAD_SYNC,
    "offload": Lane.COPY,
}
KINDS = frozenset({*_LANES, "p2p"})


class Event(NamedTuple):
    """Something a rank did, or waited for.

    ``name`` is the action where there is one (``2F0``, ``0REDUCE_GRAD``), or words (``optimizer``,
    ``wait 2F0``: the input of 2F0 is missing). ``kind`` is one of `KINDS`. A ``p2p`` event of a
    SEND is the moment of departure, one of a RECV lasts from its post until it was taken.
    """

    name: str
    start_s: float
    end_s: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTrace:
    """One iteration on one rank; events count from its start."""

    iteration: int
    """Megatron's number, as in its log."""
    start_s: float
    """Unix time, of this rank's clock."""
    end_s: float
    """After its start; what runs beside computation may end later."""
    events: tuple[Event, ...]
    gpu_memory_bytes: int | None
    """The most that tensors have held so far, where there is a GPU."""
    host_memory_bytes: int
    """The most that the process has held so far."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Of what happened, under names of its own; `Metrics` writes them as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The file of one rank."""

    rank: int
    pp_rank: int
    dp_rank: int
    tp_rank: int
    num_ranks: int
    num_segments: int
    num_microbatches: int
    schedule: str
    plan: str
    """Text form; only rank 0 has it, and only under a schedule of ours."""
    iterations: tuple[IterationTrace, ...]

    @property
    def file_name(self) -> str:
        """Where `read_ranks` looks for it."""
        return f"rank-{self.rank:05}.json"

    def to_json(self) -> str:
        """Return the file's text; the inverse is `from_json`."""
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))

    @classmethod
    @gc_paused()
    def from_json(cls, text: str) -> Self:
        """Read `to_json`.

        Raises:
            ValueError: the text is no trace, or one of another version.
        """
        try:
            found = json.loads(text)
            version = found.pop("version")
            if version != VERSION:
                raise ValueError(f"found version {version}, this is for {VERSION}; trace again")
            rows = [dict(row) for row in found.pop("iterations")]
            for row in rows:
                row["events"] = tuple(Event(*event) for event in row["events"])
                if unknown := {event.kind for event in row["events"]} - KINDS:
                    raise ValueError(f"found events of kind {', '.join(sorted(unknown))}")
            return cls(**found, iterations=tuple(IterationTrace(**row) for row in rows))
        except json.JSONDecodeError as error:
            raise ValueError(f"cut off, or not a trace: {error}; copy it or trace again") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a trace: {error}") from None


def read_trace(folder: Path) -> Timeline:
    """Return the timeline of the first pipeline of a traced run.

    Raises:
        ValueError: there is no trace, or not one of every pipeline rank.
    """
    return to_timeline(pipeline(read_ranks(folder)))


def read_ranks(folder: Path) -> tuple[RankTrace, ...]:
    """Return the traces of all ranks, in order.

    Raises:
        ValueError: there is none, a file is not one, or they are not of one job.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; give one that --trace wrote")
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        raise ValueError(f"{folder} holds no rank-*.json; train with --trace {folder}")
    ranks = []
    for path in paths:
        try:
            ranks.append(RankTrace.from_json(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    for rank, path in zip(ranks, paths, strict=True):
        if difference := _another_job(ranks[0], rank):
            raise ValueError(
                f"{path} is of another job than {paths[0].name}: {difference}; "
                "move what is old out of the folder, or trace again into a new one"
            )
    return tuple(ranks)


def _another_job(first: RankTrace, other: RankTrace) -> str:
    """Say by what two ranks cannot be of one job; nothing if they can."""
    for name in ("schedule", "num_ranks", "num_segments", "num_microbatches"):
        ours, theirs = getattr(first, name), getattr(other, name)
        if ours != theirs:
            return f"{name} {theirs}, not {ours}"
    starts_s = {row.iteration: row.start_s for row in first.iterations}
    for row in other.iterations:
        apart_s = abs(row.start_s - starts_s.get(row.iteration, row.start_s))
        if apart_s > _APART_S:
            return f"their iterations {row.iteration} are {apart_s:.0f} s apart"
    return ""


def pipeline(ranks: Sequence[RankTrace], number: int = 0) -> tuple[RankTrace, ...]:
    """Return the ranks of one pipeline; each position of it has as many ranks as there are.

    Raises:
        ValueError: a rank of it is missing.
    """
    found = tuple(
        next((rank for rank in _at(ranks, position)[number:]), None)
        for position in range(ranks[0].num_ranks)
    )
    if None in found:
        raise ValueError(
            f"found traces of {len(ranks)} ranks, none of pipeline rank {found.index(None)}; "
            "collect the files of all nodes in one folder"
        )
    return tuple(rank for rank in found if rank is not None)


def _at(ranks: Sequence[RankTrace], position: int) -> list[RankTrace]:
    return sorted((r for r in ranks if r.pp_rank == position), key=lambda rank: rank.rank)


@gc_paused()
def to_timeline(ranks: Sequence[RankTrace]) -> Timeline:
    """Return what the ranks of one pipeline did in the iterations that all have recorded.

    Zero is the start of the first; iterations are numbered from zero, as in simulated timelines.

    Raises:
        ValueError: there is no such iteration.
    """
    common = set.intersection(*({row.iteration for row in rank.iterations} for rank in ranks))
    recorded = [[row for row in rank.iterations if row.iteration in common] for rank in ranks]
    if not common:
        raise ValueError("found no iteration that all ranks recorded; trace again")
    clocks = [
        [
            _Clocked(row, number, row.start_s - recorded[0][0].start_s)
            for number, row in enumerate(rows)
        ]
        for rows in recorded
    ]
    spans = [[span for clocked in rows for span in clocked.spans()] for rows in clocks]
    messages = [list(_messages(clocks, rank)) for rank in range(len(ranks))]
    offsets_s = _offsets(messages)
    start_s = min(rows[0].start_s + offsets_s[rank] for rank, rows in enumerate(clocks))
    offsets_s = [offset_s - start_s for offset_s in offsets_s]
    return Timeline.of(
        [
            [_moved(span, offsets_s[rank]) for span in spans[rank]]
            + [m.span(offsets_s) for m in messages[rank]]
            for rank in range(len(ranks))
        ]
    )


def spans_of(row: IterationTrace) -> list[Span]:
    """Return what a rank did in an iteration and knows by itself: all but its messages."""
    return list(_Clocked(row, 0, 0.0).spans())


@dataclass(frozen=True, slots=True)
class _Clocked:
    """One iteration of one rank, on the run's time."""

    row: IterationTrace
    number: int
    start_s: float

    def spans(self) -> Iterator[Span]:
        """Yield what the rank did by itself; what lies within something else interrupts it."""
        events = sorted(self.row.events, key=lambda event: (event.start_s, -event.end_s))
        # A wait for a message is a gap: the message's own span says why.
        shown = [(e, _action(e.name)) for e in events if e.kind != "p2p"]
        shown = [(e, action) for e, action in shown if e.kind != "wait" or action is not None]
        busy = [event for event, _ in shown if _LANES[event.kind] in BUSY_LANES]
        position = 0
        for event, action in shown:
            lane, pieces = _LANES[event.kind], [(event.start_s, event.end_s)]
            if lane in BUSY_LANES:
                position += 1
                pieces = list(_pieces(event, busy, position))
            for start_s, end_s in pieces:
                start_s, end_s = self.start_s + start_s, self.start_s + end_s
                yield Span(lane, start_s, end_s, action, self.number)

    def times(self) -> Mapping[Action, tuple[float, float]]:
        """Return when each action began and ended, of those with a micro-batch."""
        return {
            action: (self.start_s + event.start_s, self.start_s + event.end_s)
            for event in self.row.events
            if event.kind in ("compute", "p2p") and (action := _action(event.name)) is not None
        }

    def found_inputs(self) -> Mapping[Action, float]:
        """Return since when a rank was free for what it then did not wait for.

        Such a message was there before it was taken, and nobody knows how long before.
        """
        waits = {e.name: e.end_s - e.start_s for e in self.row.events if e.kind == "wait"}
        busy = [e for e in self.row.events if _LANES.get(e.kind) in BUSY_LANES]
        work = sorted(
            (e for e in busy if e.kind != "wait" or _action(e.name)), key=lambda e: e.start_s
        )
        return {
            Action.from_str(event.name): self.start_s + before.end_s
            for before, event in pairwise(work)
            if 2 * waits.get(f"wait {event.name}", inf) < event.start_s - before.end_s
        }


@dataclass(frozen=True, slots=True)
class _Message:
    """A message from its departure on the sender's clock to its arrival on the receiver's."""

    action: Action
    sender: int
    receiver: int
    departure_s: float
    arrival_s: float
    found_s: float
    """When the receiver was free to take it, if it did not wait for it then."""
    iteration: int

    def span(self, offsets_s: Sequence[float]) -> Span:
        start_s = self.departure_s + offsets_s[self.sender]
        end_s = self.arrival_s + offsets_s[self.receiver]
        end_s = min(end_s, max(start_s, self.found_s + offsets_s[self.receiver]))
        return Span(Lane.P2P, min(start_s, end_s), end_s, self.action, self.iteration)


def _messages(clocks: Sequence[Sequence[_Clocked]], receiver: int) -> Iterator[_Message]:
    """Yield the messages that a rank received.

    Where sends and receives were not recorded, as under stock's schedules, a message leaves when it
    has been computed and has arrived when its own computation begins.
    """
    num_ranks = len(clocks)
    if num_ranks == 1:
        return
    for number, clocked in enumerate(clocks[receiver]):
        here, found_s = clocked.times(), clocked.found_inputs()
        there = [rows[number].times() for rows in clocks]
        for action, (start_s, _) in here.items():
            if (message := message_to(action)) is None:
                continue
            source = source_of(message)
            sender = source.stage % num_ranks
            if (computed := there[sender].get(source)) is None:
                continue  # the first stage reads no message, nor does the last one's backward
            sent = there[sender].get(send_of(message))
            yield _Message(
                action=message,
                sender=sender,
                receiver=receiver,
                departure_s=sent[0] if sent else computed[1],
                arrival_s=here[message][1] if message in here else start_s,
                found_s=found_s.get(action, inf),
                iteration=number,
            )


def _offsets(messages: Sequence[Sequence[_Message]]) -> list[float]:
    """Return what to add to each rank's clock so that no message arrives before it has left.

    Clocks of one machine agree, those of several to a millisecond or so. Each rank is moved as
    little as its messages from and to the rank before it demand.
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
    """Yield the parts of an event in which nothing else runs; the others follow it in ``busy``."""
    at_s = event.start_s
    while position < len(busy) and busy[position].start_s < event.end_s:
        if busy[position].start_s > at_s:
            yield at_s, busy[position].start_s
        at_s = max(at_s, busy[position].end_s)
        position += 1
    if at_s < event.end_s or at_s == event.start_s:
        yield at_s, event.end_s


def _moved(span: Span, by_s: float) -> Span:
    return span._replace(start_s=span.start_s + by_s, end_s=span.end_s + by_s) if by_s else span


def _action(name: str) -> Action | None:
    try:
        return Action.from_str(name)
    except PlanError:
        return None
