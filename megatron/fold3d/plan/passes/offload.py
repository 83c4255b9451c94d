"""The pass that copies saved activations to host memory and back.

An offload starts when its forward has ended, and the reload runs during the computation before its
backward. Activations that are needed again too soon stay on the device:

    before  rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    after   rank 0  0F0 0OFFLOAD0 0F1 0OFFLOAD1 2F0 2F1 2B0 0RELOAD0 2B1 0RELOAD1 0B0 0B1
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.fold3d.plan.ir import Action, Op, Program, per_rank
from megatron.fold3d.plan.ops import COMPUTE_OPS

_Key = tuple[int, int | None]  # stage, micro-batch


@dataclass(frozen=True, slots=True)
class OffloadChoice:
    """How many activations are offloaded and how early: the options of `add_offload`.

    Attributes:
        depth: the number of computations that an offload, or a reload, may overlap.
    """

    at_most: int | None = None
    depth: int = 1


@per_rank
def add_offload(
    program: Program, *, depth: int = 1, at_most: int | None = None
) -> Iterator[Action]:
    """Add OFFLOAD and RELOAD of saved activations (paper Sec. IV, offloader).

    An offload runs during the rank's next ``depth`` computations, a reload during the ``depth``
    computations before the backward. Activations without enough computations between forward and
    backward stay on the device. Ranks may offload differently, without effect on each other.

    Args:
        program: a program with or without transfers; an output is sent before an offload starts.
        depth: more than 1 if a copy takes longer than one computation.
        at_most: the most activations of a rank to offload; the longest unused ones come first.
    """
    compute = [action for action in program if action.op in COMPUTE_OPS]
    used: dict[_Key, int] = {}  # index of the backward or recomputation that reads an activation
    for index, (stage, op, microbatch) in enumerate(compute):
        if op is Op.BACKWARD or op is Op.RECOMPUTE:
            used.setdefault((stage, microbatch), index)
    offloaded = _offloaded(compute, used, depth, at_most)
    reloads = {  # by the computation that a reload overlaps
        compute[index - depth]: Action(stage, Op.RELOAD, microbatch)
        for (stage, microbatch), index in used.items()
        if (stage, microbatch) in offloaded
    }

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
        elif action.op is Op.FORWARD and (action.stage, action.microbatch) in offloaded:
            leaving = Action(action.stage, Op.OFFLOAD, action.microbatch)


def _offloaded(
    compute: Sequence[Action], used: Mapping[_Key, int], depth: int, at_most: int | None
) -> set[_Key]:
    """Choose the (stage, micro-batch) activations to offload."""
    forwards = {(a.stage, a.microbatch): i for i, a in enumerate(compute) if a.op is Op.FORWARD}
    alike: dict[int, list[_Key]] = defaultdict(list)  # by the number of computations until the read
    for key, index in used.items():
        away = index - forwards[key]
        if away > 2 * depth:
            alike[away].append(key)
    left = len(forwards) if at_most is None else at_most
    chosen: set[_Key] = set()
    for away in sorted(alike, reverse=True):
        candidates = alike[away]
        take = min(left, len(candidates))
        # They are evenly spread, so that each copy has the time of several computations.
        chosen |= {candidates[i * len(candidates) // take] for i in range(take)}
        left -= take
    return chosen
