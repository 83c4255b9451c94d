"""Actions and plans: a pipeline schedule as data.

A `Plan` holds one program per pipeline rank, and a program is a tuple of actions, run in order.
The executor, the verifier, the simulator and the plots all read plans, and decide no order
themselves.

In text each action is a word. ``2F0`` is stage 2's forward of micro-batch 0, ``2SEND_F0`` sends
the output, ``2ALL_REDUCE`` sums the gradients of the whole stage. ``2ALL_REDUCE:250`` sums the
part of the gradients that ends at 250 thousandths, and ``2W:250`` computes weight gradients until a
quarter of their work is done. ``str`` and ``from_str`` are inverse.

Every iteration runs the same program, so a program is a loop. The loop of a *stage* begins after
its STEP: parameters are gathered, forwards and backwards run, and gradients are summed until the
next STEP. What an action needs comes earlier in this loop. If the needed action comes later in the
program, it belongs to the previous iteration. A part begins where the previous part in the loop
ends. Three facts follow from the places of actions: `carried`, `hooked` and `Plan.flushes`.
"""

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from operator import indexOf, itemgetter
from reprlib import repr as shortened
from typing import Concatenate, NamedTuple, Self

from megatron.fold3d.plan.ops import COMPUTE_OPS, PART_OPS, STAGE_OPS, SUM_OPS, TABLE, OpScope
from megatron.fold3d.plan.ops import Op as Op

WHOLE = 1000
"""All gradients of a stage, in the unit of `OpScope.PART`: thousandths."""

MOST_SHOWN = 8  # ranks in an error
_COLUMNS = 4  # actions shown on either side of a marked one
_WIDTH = 13  # least characters of an action

_ACTION = re.compile(r"([0-9]{1,9})([A-Z_]+)(:?)([0-9]{0,9})")
_FORMS = {  # by word, colon, and whether a number follows
    (op.rstrip(":"), colon, has_number): op
    for op, row in TABLE.items()
    for colon, has_number in {
        OpScope.MICROBATCH: (("", True),),
        OpScope.PART: ((":", True), ("", False)) if op in SUM_OPS else ((":", True),),
        OpScope.STAGE: (("", False),),
    }[row.scope]
}


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector: a plan is a million tuples without a reference cycle.

    The collector would scan these tuples again and again, which doubles the time.
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

    `OpScope` says what ``microbatch`` means. If the action is a part, ``microbatch`` is the part's
    end in thousandths, and None is the rest of the stage.
    """

    stage: int
    op: Op
    microbatch: int | None = None

    def __str__(self) -> str:
        if self.microbatch is None:
            return f"{self.stage}{self.op}"
        return f"{self.stage}{self.op}{':' if self.op in SUM_OPS else ''}{self.microbatch}"

    @property
    def end(self) -> int:
        """The end of a part, in thousandths."""
        return WHOLE if self.microbatch is None else self.microbatch

    def until(self, end: int) -> Self:
        """Return the part of a sum that ends at ``end`` thousandths; `WHOLE` is spelled as None."""
        return self._replace(microbatch=end if end < WHOLE else None)

    @classmethod
    def from_str(cls, text: str) -> Self:
        """Read one action; the inverse of ``str``.

        Raises:
            PlanError: the word is not an action.
        """
        if (match := _ACTION.fullmatch(text)) is not None:
            stage, word, colon, digits = match.groups()
            op = _FORMS.get((word, colon, bool(digits)))
            number = int(digits) if digits else None
            if op is not None and (
                number is None or not colon or (digits[0] != "0" and number <= WHOLE)
            ):
                return cls(int(stage), op, None if op in SUM_OPS and number == WHOLE else number)
        raise PlanError(
            f"{shortened(text)} is not an action; write <stage><op><microbatch> such as 2F0 or "
            f"1SEND_B3, or <stage><op> for {', '.join(sorted(STAGE_OPS | SUM_OPS))}; a part of "
            "DP.sync ends with thousandths, as in 2ALL_REDUCE:250, and one of weight gradients is "
            "2W:250"
        )


Program = tuple[Action, ...]

_STAGE, _OP, _MICROBATCH = map(itemgetter, range(3))  # a plan may hold a million actions


@dataclass(frozen=True, slots=True)
class Plan:
    """The programs of all pipeline ranks, from which all sizes follow."""

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
        last = max(map(_last_microbatch, self.programs))
        object.__setattr__(self, "num_segments", stages // ranks)
        object.__setattr__(self, "num_microbatches", 1 + last)

    @property
    def num_ranks(self) -> int:
        """The number of pipeline ranks: p in the paper."""
        return len(self.programs)

    @property
    def num_stages(self) -> int:
        """The number of stages of all ranks: p times ns in the paper."""
        return self.num_segments * self.num_ranks

    def has(self, *ops: Op) -> bool:
        """Return True if the plan has an action of any of these ops."""
        return any(op in map(_OP, program) for op in ops for program in self.programs)

    @property
    def flushes(self) -> bool:
        """True if a step ends its iteration: all ranks then wait for the norm of all gradients."""
        return any(
            op is Op.STEP and stage not in at_start
            for program in self.programs
            for at_start in (carried(program),)
            for stage, op, _ in program
        )

    def lowered(self, lower: Callable[[Program], Iterable[Action]]) -> "Plan":
        """Return the plan in which ``lower`` has rewritten each program."""
        return Plan(tuple(tuple(lower(program)) for program in self.programs))

    def select(self, ops: Iterable[Op]) -> "Plan":
        """Return the plan with only the actions of these ops."""
        keep = frozenset(ops)
        return self.lowered(lambda program: (a for a in program if a.op in keep))

    def to_text(self) -> str:
        """Return one line per rank, with actions separated by blanks."""
        return "".join(" ".join(row) + "\n" for row in self.to_rows())

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read the text of `to_text`; empty lines and lines that begin with ``#`` are skipped.

        Raises:
            PlanError: a word is not an action, or the sizes are inconsistent.
        """
        return cls.from_rows(line.split() for line in lines_of(text))

    def to_rows(self) -> Iterator[list[str]]:
        """Yield each rank's program as text, word by word."""
        return ([str(action) for action in program] for program in self.programs)

    @classmethod
    @gc_paused()
    def from_rows(cls, rows: Iterable[Iterable[str]]) -> Self:
        """Read rows of words, of which blank ones are skipped; raises as `from_text`."""
        programs = []
        for rank, row in enumerate(rows):
            words = [word for cell in row if (word := cell.strip())]
            try:
                programs.append(tuple(map(Action.from_str, words)))
            except PlanError as error:
                raise PlanError(f"rank {rank}: {error}") from None
        return cls(tuple(programs))


def per_rank[**P](
    lower: Callable[Concatenate[Program, P], Iterable[Action]],
) -> Callable[Concatenate[Plan, P], Plan]:
    """Turn a function that rewrites one rank's program into a pass."""

    @wraps(lower)
    def lowered(plan: Plan, /, *args: P.args, **kwargs: P.kwargs) -> Plan:
        return plan.lowered(lambda program: lower(program, *args, **kwargs))

    return lowered


def _last_microbatch(program: Program) -> int:
    last = max(filter(None, map(_MICROBATCH, program)), default=None)
    if last is not None and program[indexOf(map(_MICROBATCH, program), last)].op in PART_OPS:
        last = max((m or 0 for _, op, m in program if op not in PART_OPS), default=0)
    return last or 0


def stages_of(segments: Iterable[int], num_ranks: int) -> tuple[int, ...]:
    """Return the stages of these segments on all ranks."""
    return tuple(segment * num_ranks + rank for segment in segments for rank in range(num_ranks))


def carried(program: Program) -> dict[int, int]:
    """Return the carried stages, whose STEP stands before their first forward, as {stage: index}.

    The index is the place of the STEP. Actions of the stage before the STEP handle the gradients of
    the previous iteration.
    """
    begun: set[int] = set()
    steps: dict[int, int] = {}
    for index, (stage, op, _) in enumerate(program):
        if op is Op.FORWARD:
            begun.add(stage)
        elif op is Op.STEP and stage not in begun:
            steps[stage] = index
        elif op is Op.BACKWARD:  # by now the forwards of all stages have begun
            break
    return steps


def hooked(program: Program) -> frozenset[int]:
    """Return the stages whose whole sum follows their last backward, with no computation between.

    DDP's hooks may start such a sum inside the last backward.
    """
    found: set[int] = set()
    last: Action | None = None  # the last computation
    for action in program:
        if action.op in COMPUTE_OPS:
            last = action
        elif action.op in SUM_OPS and last and last[:2] == (action.stage, Op.BACKWARD):
            found.add(action.stage)
    parts = {a.stage for a in program if a.op in SUM_OPS and a.microbatch is not None}
    return frozenset(found - parts - carried(program).keys())


def lines_of(text: str) -> Iterator[str]:
    """Yield a plan's lines, without empty ones and comments."""
    return (line for line in text.splitlines() if line.strip() and not line.startswith("#"))


def cell_of(plan: Plan, action: Action) -> dict[int, int]:
    """Return the action's last position, as {rank: index}."""
    rank = action.stage % plan.num_ranks
    program = plan.programs[rank]
    return {rank: len(program) - 1 - program[::-1].index(action)}


def error_at(plan: Plan, marked: Mapping[int, int], text: str) -> PlanError:
    """Return an error whose message ends with each rank's actions around the marked ones.

    Args:
        marked: by rank, the index of the action to enclose in > <.
        text: the first line of the message.
    """
    first, last = min(marked), max(marked)
    rows: dict[int, list[str]] = {}
    for rank in range(max(0, first - 1), min(plan.num_ranks, last + 2))[:MOST_SHOWN]:
        centre = marked.get(rank, marked[first])
        start = max(0, centre - _COLUMNS)
        rows[rank] = [
            f">{action}<" if marked.get(rank) == start + i else f" {action} "
            for i, action in enumerate(plan.programs[rank][start : centre + _COLUMNS + 1])
        ]
    width = max(_WIDTH, *(len(cell) + 1 for cells in rows.values() for cell in cells))
    lines = [
        f"  rank {rank:>2} |" + "".join(f"{cell:<{width}}" for cell in cells).rstrip()
        for rank, cells in rows.items()
    ]
    return PlanError("\n".join([text, *lines]))
