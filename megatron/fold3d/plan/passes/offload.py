"""The pass that sends saved activations to host memory and back.

Each leaves when its forward has ended and comes back while the backward before its own runs. What
is needed again too soon stays:

    before  rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    after   rank 0  0F0 0OFFLOAD0 0F1 0OFFLOAD1 2F0 2F1 2B0 0RELOAD0 2B1 0RELOAD1 0B0 0B1
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.fold3d.plan.ir import COMPUTE_OPS, Action, Op, Plan, Program

_Key = tuple[int, int | None]  # stage, micro-batch


@dataclass(frozen=True, slots=True)
class OffloadChoice:
    """The activations that leave and how early, as `add_offload` takes them.

    Attributes:
        at_most: how many activations; None is all.
        depth: computations that each has to leave, and as many to come back.
    """

    at_most: int | None = None
    depth: int = 1


def add_offload(plan: Plan, *, depth: int = 1, at_most: int | None = None) -> Plan:
    """Add the saved activations' way to host memory and back (paper Sec. IV, offloader).

    A micro-batch leaves while the rank's next ``depth`` computations run and comes back while the
    ``depth`` before its own backward do. One that could not stay away for the time between stays.
    No other rank notices: ranks may offload differently.

    Args:
        plan: with or without transfers; an output is sent before its stage's activations leave.
        depth: more where a copy takes longer than one computation.
        at_most: how many of a rank leave; first of all those that are away for longest.
    """
    return Plan(tuple(_with_offload(program, depth, at_most) for program in plan.programs))


def _with_offload(program: Program, depth: int, at_most: int | None) -> Program:
    compute = [action for action in program if action.op in COMPUTE_OPS]
    used = _first_uses(compute)
    travels = _travels(compute, used, depth, at_most)
    reloads = {  # by the computation during which they come back
        compute[index - depth]: Action(stage, Op.RELOAD, microbatch)
        for (stage, microbatch), index in used.items()
        if (stage, microbatch) in travels
    }

    def lower() -> Iterator[Action]:
        leaving = None
        for action in program:
            if leaving and action != (leaving.stage, Op.SEND_F, leaving.microbatch):
                yield leaving
                leaving = None
            if action in reloads:
                yield reloads[action]
            yield action
            if leaving:
                yield leaving
                leaving = None
            elif action.op is Op.FORWARD and (action.stage, action.microbatch) in travels:
                leaving = Action(action.stage, Op.OFFLOAD, action.microbatch)

    return tuple(lower())


def _first_uses(compute: Sequence[Action]) -> dict[_Key, int]:
    """Return the index of each (stage, micro-batch)'s first use: its backward, or recomputation."""
    used: dict[_Key, int] = {}
    for index, (stage, op, microbatch) in enumerate(compute):
        if op is Op.BACKWARD or op is Op.RECOMPUTE:
            used.setdefault((stage, microbatch), index)
    return used


def _travels(
    compute: Sequence[Action], used: Mapping[_Key, int], depth: int, at_most: int | None
) -> set[_Key]:
    """Choose the (stage, micro-batch) activations that leave the device."""
    forwards = {(a.stage, a.microbatch): i for i, a in enumerate(compute) if a.op is Op.FORWARD}
    alike: dict[int, list[_Key]] = defaultdict(list)  # by how long they wait
    for key, index in used.items():
        away = index - forwards[key]
        if away > 2 * depth:
            alike[away].append(key)
    left = len(forwards) if at_most is None else at_most
    chosen: set[_Key] = set()
    for away in sorted(alike, reverse=True):
        candidates = alike[away]
        take = min(left, len(candidates))
        # Evenly spread, so that copies have the time of several computations each.
        chosen |= {candidates[i * len(candidates) // take] for i in range(take)}
        left -= take
    return chosen
