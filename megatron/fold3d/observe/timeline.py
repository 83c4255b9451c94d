"""Timelines: what each rank did and when, simulated or measured.

Both have one type, so a measured run can be drawn beside its simulation and compared with it
number by number. A span names the action of the plan to which it belongs; the lanes of one rank run
concurrently.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from typing import NamedTuple, Self

from megatron.fold3d.plan.ir import Action


class Lane(StrEnum):
    """Activities that a rank can overlap; only the `BUSY_LANES` exclude each other."""

    COMPUTE = "compute"
    OPTIMIZER = "optimizer"
    WAIT = "wait"  # for its action to be over or, without action, at the end of an iteration
    P2P = "p2p"  # on the receiving rank, as its RECV: from the departure to the arrival
    GRAD_SYNC = "grad_sync"
    COPY = "copy"
    TP_SYNC = "tp_sync"  # tensor-parallel collectives under way, inside computations
    EP_SYNC = "ep_sync"  # all-to-alls of experts, likewise


BUSY_LANES = frozenset({Lane.COMPUTE, Lane.OPTIMIZER, Lane.WAIT})
LAYER_SYNCS = {Lane.TP_SYNC: "TP.sync", Lane.EP_SYNC: "EP.sync"}
"""The lanes of what layers do inside computations, and their names."""
ROWS = (Lane.COMPUTE, *LAYER_SYNCS, Lane.P2P, Lane.GRAD_SYNC, Lane.COPY)
"""The rows of a rank in a diagram, from the top."""


class Span(NamedTuple):
    """One interval of one lane; an action that was interrupted has several."""

    lane: Lane
    start_s: float
    end_s: float
    action: Action | None = None
    iteration: int = 0

    @property
    def duration_s(self) -> float:
        """The seconds from start to end."""
        return self.end_s - self.start_s

    @property
    def word(self) -> str:
        """The action, or what else is done: ``2F0``, ``wait 0ALL_GATHER``, ``optimizer 2``."""
        if self.action is None:
            return self.lane
        if self.lane is Lane.OPTIMIZER:
            return f"{self.lane} {self.action.stage}"
        return "wait " * (self.lane is Lane.WAIT) + str(self.action)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of every pipeline rank, each rank's in the order of their start.

    Zero is the start of the run. A measured timeline's clocks are aligned before it is made.
    """

    ranks: tuple[tuple[Span, ...], ...]

    @classmethod
    def of(cls, ranks: Iterable[Iterable[Span]]) -> Self:
        """Collect spans in any order, one iterable per rank."""
        start_s = itemgetter(1)
        return cls(tuple(tuple(sorted(spans, key=start_s)) for spans in ranks))

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    @property
    def num_segments(self) -> int:
        """Segments that the spans name."""
        stages = (s.action.stage for spans in self.ranks for s in spans if s.action is not None)
        return 1 + max(stages, default=0) // max(1, self.num_ranks)

    @property
    def makespan_s(self) -> float:
        """The end of the last rank's last action, in s; DP.sync may still be under way."""
        return max(
            (s.end_s for spans in self.ranks for s in spans if s.lane in BUSY_LANES), default=0.0
        )

    @property
    def ends_s(self) -> tuple[float, ...]:
        """The ends of the iterations in seconds, each on its last rank."""
        of_ranks = filter(None, map(self.iteration_ends_s, range(self.num_ranks)))  # some may idle
        return tuple(map(max, zip(*of_ranks, strict=False)))

    @property
    def period_s(self) -> float:
        """Time of the last iteration, from the end of the one before it."""
        ends = (0.0, 0.0, *self.ends_s)
        return ends[-1] - ends[-2]

    def lane(self, rank: int, lane: Lane) -> tuple[Span, ...]:
        """Return one lane of one rank."""
        return tuple(span for span in self.ranks[rank] if span.lane is lane)

    def iteration_ends_s(self, rank: int) -> tuple[float, ...]:
        """Return the ends of a rank's program in seconds, one per iteration."""
        ends: dict[int, float] = {}
        for lane, _, end_s, _, iteration in self.ranks[rank]:
            if lane in BUSY_LANES:
                ends[iteration] = max(end_s, ends.get(iteration, 0.0))
        return tuple(ends[i] for i in sorted(ends))

    def between(self, start_s: float, end_s: float) -> Self:
        """Return the part of the timeline in a window, whose start becomes zero."""

        def cut(span: Span) -> Span:
            first, last = max(span.start_s, start_s), min(span.end_s, end_s)
            return span._replace(start_s=first - start_s, end_s=last - start_s)

        return type(self)(
            tuple(
                tuple(cut(span) for span in spans if span.start_s < end_s and span.end_s > start_s)
                for spans in self.ranks
            )
        )


def by_row(spans: Iterable[Span]) -> dict[Lane, list[Span]]:
    """Return a rank's spans by the rows of a diagram: the busy lanes are one, ``compute``."""
    rows: dict[Lane, list[Span]] = {lane: [] for lane in ROWS}
    for span in spans:
        rows[Lane.COMPUTE if span.lane in BUSY_LANES else span.lane].append(span)
    return rows


def covered_s(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one of the spans is under way."""
    total_s, until_s = 0.0, 0.0
    for _, start_s, end_s, *_ in sorted(spans, key=itemgetter(1)):
        total_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def queued(spans: Iterable[Span]) -> list[Span]:
    """Return the spans of one lane by their ends, each begun no earlier than the previous ended.

    A measured collective begins with its launch and may then wait in a queue.
    """
    served, free_s = [], 0.0
    for span in sorted(spans, key=lambda span: span.end_s):
        served.append(span._replace(start_s=min(span.end_s, max(span.start_s, free_s))))
        free_s = span.end_s
    return served
