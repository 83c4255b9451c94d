"""Traces: the files that ``--trace DIR`` writes, one JSON file per rank.

A file has only its own rank's events, on that rank's clock. `trace_timeline` combines the ranks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from megatron.fold3d.observe.fields import check_fields, is_number, parse_json, read_as
from megatron.fold3d.observe.timeline import Lane
from megatron.fold3d.plan.ir import gc_paused

VERSION = 2
CLOCKS = {
    "host": "the host notes when it begins and ends what it does",
    "polls": "the host asks the GPU every 0.1 ms what it has passed; no event is timed",
}
"""What ``clock`` of a trace means."""
_APART_S = 600.0  # no clock of a cluster is this wrong
_MOST_SEGMENTS = 10_000  # each has at least a layer, and a color on the page
LANES = {
    "compute": Lane.COMPUTE,
    "optimizer": Lane.OPTIMIZER,
    "wait": Lane.WAIT,
    "grad_sync": Lane.GRAD_SYNC,
    "param_gather": Lane.GRAD_SYNC,
    "offload": Lane.COPY,
    "p2p": Lane.P2P,
    "tp_sync": Lane.TP_SYNC,
    "ep_sync": Lane.EP_SYNC,
}
"""The lane of each kind of event."""


class Event(NamedTuple):
    """An activity or a wait of a rank.

    ``kind`` is one of `LANES`. ``name`` is the action where there is one (``2F0``,
    ``0ALL_REDUCE:600``, or ``0STEP`` for the optimizer's step of one stage) and otherwise words:
    ``optimizer`` or ``TP.sync``. A wait has the name of what is waited for: ``wait 0ALL_GATHER``,
    or ``wait 2RECV_F0`` while the input of 2F0 is missing. The ``p2p`` event of a SEND is the
    moment at which the message left; that of a RECV lasts from its post until the message was
    taken.
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
    """Unix time, by this rank's clock."""
    end_s: float
    """Seconds from its start. Events that overlap computation may end later."""
    events: tuple[Event, ...]
    gpu_memory_bytes: int | None
    """The most that tensors have held so far, where there is a GPU."""
    host_memory_bytes: int
    """The most that the process has held so far."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers that were counted during the iteration, by name."""

    def check(self) -> None:
        """Check that every number in it is valid; see `RankTrace.check`."""
        check_fields(self, may_be_zero=("iteration", "start_s", "end_s", "host_memory_bytes"))
        if wrong := [number for number in self.counts.values() if not is_number(number)]:
            raise ValueError(f"found {wrong[0]!r} in iteration {self.iteration}; it is a number")
        for event in self.events:
            name: object = event.name
            if not isinstance(name, str) or not all(map(is_number, (event.start_s, event.end_s))):
                raise ValueError(f"found {[*event]}; an event is a name, two times and a kind")
            if event.kind not in LANES:
                known = ", ".join(LANES)
                raise ValueError(f"found an event of kind {event.kind!r}; known are {known}")


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
    microbatch_flops: float = 0.0
    """Of the model's forward and backward of one micro-batch, without recomputation; 0 if the
    planner does not know the model."""
    recomputed_flops: float = 0.0
    """Of what a micro-batch's backward computes again."""
    cp_rank: int = 0
    clock: str = "host"
    """Where its times come from: `CLOCKS`."""
    shares_cores: bool = False
    """Whether all ranks compute on the cores of one machine, with no network between them."""

    @property
    def file_name(self) -> str:
        """The name under which `read_ranks` looks for it."""
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
            found = parse_json(text)
            if not isinstance(found, dict) or "version" not in found:
                raise ValueError("found no version in it; give a folder that --trace wrote")
            if (version := found.pop("version")) != VERSION:
                raise ValueError(f"found version {version!r}, this is for {VERSION}; trace again")
            rows = [dict(row) for row in found.pop("iterations")]
            for row in rows:
                row["events"] = tuple(Event(*event) for event in row["events"])
            trace = cls(**found, iterations=tuple(IterationTrace(**row) for row in rows))
            trace.check()
        except json.JSONDecodeError as error:
            raise ValueError(f"cut off, or not a trace: {error}; copy it or trace again") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a trace: {error}") from None
        return trace

    def check(self) -> None:
        """Check that `to_json` could have written this, so that readers need not check again.

        Raises:
            ValueError: a value is not a number, or out of its range.
        """
        check_fields(self, may_be_zero=("rank", "pp_rank", "dp_rank", "tp_rank"))
        if self.pp_rank >= self.num_ranks:
            raise ValueError(f"found pp_rank={self.pp_rank} of num_ranks={self.num_ranks}")
        if self.num_segments > _MOST_SEGMENTS:
            raise ValueError(f"found num_segments={self.num_segments}; at most {_MOST_SEGMENTS}")
        if self.clock not in CLOCKS:
            raise ValueError(f"found clock={self.clock!r}; known are {', '.join(CLOCKS)}")
        for row in self.iterations:
            row.check()
        numbers = [row.iteration for row in self.iterations]
        if numbers != sorted(set(numbers)):
            raise ValueError(f"found iterations {numbers}; each is there once, in order")


def read_ranks(folder: Path) -> tuple[RankTrace, ...]:
    """Return the traces of all ranks, in order.

    Raises:
        ValueError: there is none, a file is not one, or they are not of one job.
    """
    if not folder.is_dir():
        found = "a file" if folder.is_file() else "there is no such folder"
        raise ValueError(f"{folder}: {found}; give a folder that --trace wrote")
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        raise ValueError(f"{folder} holds no rank-*.json; train with --trace {folder}")
    ranks = tuple(read_as(path, RankTrace.from_json) for path in paths)
    for rank, path in zip(ranks, paths, strict=True):
        if difference := _another_job(ranks[0], rank):
            raise ValueError(
                f"{path} is of another job than {paths[0].name}: {difference}; "
                "move what is old out of the folder, or trace again into a new one"
            )
    return ranks


def _another_job(first: RankTrace, other: RankTrace) -> str:
    """Return why two ranks cannot belong to one job; empty if they can."""
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
    """Return the ranks of one pipeline, by its number, in the order of the pipeline.

    Raises:
        ValueError: a rank of it is missing, or there are not so many pipelines.
    """
    # Look for one position more than there are ranks, not for as many as a file may claim.
    positions = range(min(ranks[0].num_ranks, len(ranks) + 1))
    by_rank = sorted(ranks, key=lambda rank: rank.rank)
    at = [[rank for rank in by_rank if rank.pp_rank == position] for position in positions]
    counts = [len(found) for found in at]
    if 0 < max(counts) == min(counts) <= number:
        raise ValueError(f"found no pipeline {number}; the last one is {max(counts) - 1}")
    if min(counts) <= number:
        raise ValueError(
            f"found traces of {len(ranks)} ranks, none of pipeline rank "
            f"{counts.index(min(counts))}; collect the files of all nodes in one folder"
        )
    return tuple(found[number] for found in at)
