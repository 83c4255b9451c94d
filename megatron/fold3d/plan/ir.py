"""Actions and plans: a pipeline schedule as data.

A `Plan` holds one program per pipeline rank and a program is a tuple of actions, run in order.
The executor, the verifier, the simulator and the plots all read this one type, so none of them
has an order of its own.

Text form, one word per action: ``2F0`` is stage 2's forward of micro-batch 0, ``2SEND_F0`` sends
its output, ``2REDUCE_GRAD`` reduces the gradients of the whole stage. ``2REDUCE_GRAD.250`` is a
slice that ends at 250 thousandths of these gradients, and ``2W:250`` computes weight gradients up
to a quarter of the work on them. ``str`` and ``from_str`` are inverse.
"""

import csv
import gc
import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from reprlib import repr as shortened
from typing import NamedTuple, Self

from megatron.fold3d.plan.ops import P2P_OPS, PART_OPS, STAGE_OPS
from megatron.fold3d.plan.ops import Op as Op

WHOLE = 1000
"""All gradients of a stage, in the unit of `OpScope.PART`: thousandths."""

_OPS = "|".join(map(re.escape, sorted(Op, key=len, reverse=True)))
_ACTION = re.compile(rf"([0-9]{{1,9}})({_OPS})([0-9]{{0,9}})")


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector: a plan is a million tuples without a reference cycle.

    Without the pause, the collector scans them again and again, which doubles the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class PlanError(ValueError):
    """A plan that cannot run, or text that is not a plan."""


class Action(NamedTuple):
    """One step of one rank; ``stage`` is global: ``segment * num_ranks + rank``.

    ``microbatch`` is what `OpScope` says: of a part it is where the part ends, in thousandths. The
    part begins where the one before it ends.
    """

    stage: int
    op: Op
    microbatch: int | None = None

    def __str__(self) -> str:
        if self.op is Op.REDUCE_SLICE:
            return f"{self.stage}{self.op}{self.microbatch:03}"
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def from_str(cls, text: str) -> Self:
        """Read one action; the inverse of ``str``.

        Raises:
            PlanError: the word is not an action.
        """
        match = _ACTION.fullmatch(text)
        if match is not None:
            stage, word, number = match.groups()
            op = Op(word)
            if op is Op.REDUCE_SLICE:
                if len(number) == 3:  # below WHOLE
                    return cls(int(stage), op, int(number))
            elif op in PART_OPS:
                if number and number[0] != "0" and int(number) <= WHOLE:
                    return cls(int(stage), op, int(number))
            elif (number == "") == (op in STAGE_OPS):
                return cls(int(stage), op, int(number) if number else None)
        raise PlanError(
            f"{shortened(text)} is not an action; write <stage><op><microbatch> such as 2F0 or "
            f"1SEND_B3, or <stage><op> for {', '.join(sorted(STAGE_OPS))}; a slice of DP.sync ends "
            "with three digits, as in 2REDUCE_GRAD.250, and a part of weight gradients is 2W:250"
        )


Program = tuple[Action, ...]

_STAGE, _OP, _MICROBATCH = map(itemgetter, range(3))  # a plan may hold a million actions


@dataclass(frozen=True, slots=True)
class Plan:
    """The programs of all pipeline ranks, and the sizes that follow from them."""

    programs: tuple[Program, ...]
    num_segments: int = field(init=False)
    num_microbatches: int = field(init=False)

    def __post_init__(self) -> None:
        ranks = len(self.programs)
        stages = 1 + max((max(map(_STAGE, p)) for p in self.programs if p), default=-1)
        if not stages:
            raise PlanError("a plan needs at least one rank and one action")
        if stages % ranks:
            raise PlanError(
                f"{stages} stages on {ranks} ranks; every rank holds the same number of segments, "
                "so the number of stages is a multiple of the number of ranks"
            )
        last = max(max(filter(None, map(_MICROBATCH, p)), default=0) for p in self.programs)
        if last <= WHOLE and self.has(*PART_OPS):
            last = max(m or 0 for p in self.programs for _, op, m in p if op not in PART_OPS)
        object.__setattr__(self, "num_segments", stages // ranks)
        object.__setattr__(self, "num_microbatches", 1 + last)

    @classmethod
    def generate(cls, schedule: Callable[[int], Iterable[Action]], num_ranks: int) -> Self:
        """Collect the program that ``schedule(rank)`` yields for each rank."""
        return cls(tuple(tuple(schedule(rank)) for rank in range(num_ranks)))

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks: p in the paper."""
        return len(self.programs)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks: p times ns in the paper."""
        return self.num_segments * self.num_ranks

    def has(self, *ops: Op) -> bool:
        """True if an action of one of these ops is part of the plan."""
        return any(op in map(_OP, program) for op in ops for program in self.programs)

    @property
    def has_p2p(self) -> bool:
        """True if sends and receives are part of the plan yet."""
        return any(action.op in P2P_OPS for program in self.programs for action in program)

    def select(self, ops: Iterable[Op]) -> "Plan":
        """Return the plan with only the actions of these ops."""
        keep = frozenset(ops)
        return Plan(tuple(tuple(a for a in program if a.op in keep) for program in self.programs))

    def to_text(self) -> str:
        """One line per rank, actions separated by blanks."""
        return "\n".join(" ".join(map(str, program)) for program in self.programs) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read `to_text`; empty lines and lines that begin with ``#`` are skipped.

        Raises:
            PlanError: a word is not an action, or the sizes are inconsistent.
        """
        return cls._from_rows(line.split() for line in _content(text))

    def to_csv(self) -> str:
        """One row per rank, one cell per action."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(self.programs_as_words())
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> Self:
        """Read `to_csv`, or a table with empty cells where a rank is idle.

        Raises:
            PlanError: as in `from_text`, or the text is not a CSV table.
        """
        try:
            return cls._from_rows(csv.reader(_content(text)))
        except csv.Error as error:
            raise PlanError(f"not a table of actions: {error}") from None

    def programs_as_words(self) -> Iterator[list[str]]:
        """Yield each rank's program as text, word by word."""
        return ([str(action) for action in program] for program in self.programs)

    @classmethod
    @gc_paused()
    def _from_rows(cls, rows: Iterable[Iterable[str]]) -> Self:
        programs = []
        for rank, row in enumerate(rows):
            words = [word for cell in row if (word := cell.strip())]
            try:
                programs.append(tuple(map(Action.from_str, words)))
            except PlanError as error:
                raise PlanError(f"rank {rank}: {error}") from None
        return cls(tuple(programs))


def _content(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
