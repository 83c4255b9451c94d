"""The choice from measured times which activations a rank offloads, and how early it reloads them.

Each rank chooses for itself, since its copies to and from the host do not affect other ranks.
"""

import logging
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from megatron.fold3d.plan.ir import Op, Plan, Program
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.passes.offload import OffloadChoice, add_offload
from megatron.fold3d.policy.copy_streams import CopyStreams
from megatron.fold3d.policy.measured_times import usable_bytes

logger = logging.getLogger(__name__)

_HIDDEN = 0.01  # waits for copies below this share of the compute time do not count
_DEPTHS = range(1, 9)


@dataclass(frozen=True, slots=True)
class OffloadTimes:
    """An iteration's measurements: times in seconds, sizes in bytes.

    Attributes:
        activation_bytes: the largest activations of one (segment, micro-batch).
        held: the most such activations on the device at once.
        spare_bytes: device memory that was never used; None on a CPU.
    """

    activation_bytes: int
    held: int
    spare_bytes: int | None
    forward_s: float
    backward_s: float
    offload_s: float
    reload_s: float


def offloaded(program: Program, choice: OffloadChoice) -> Program:
    """Return a rank's program with a choice's OFFLOAD and RELOAD actions."""
    plan = add_offload(Plan((program,)), depth=choice.depth, at_most=choice.at_most)
    return plan.programs[0]


def choose_offload(program: Program, measured: OffloadTimes, *, sparing: bool) -> OffloadChoice:
    """Return how many activations to offload, and the smallest depth that hides their copies.

    Args:
        sparing: offload no more than memory requires, and only as much as computations hide;
            otherwise offload all, and hide nearly as much as memory allows.
    """
    if measured.spare_bytes is None:
        # A CPU has only host memory, and its copies are synchronous.
        return OffloadChoice(0 if sparing else None)
    most_held = measured.held + int(usable_bytes(measured.spare_bytes)) // measured.activation_bytes
    most = sum(action.op is Op.FORWARD for action in program)
    computed_s = most * measured.forward_s + (len(program) - most) * measured.backward_s

    def too_many(choice: OffloadChoice) -> int:
        plan = Plan((offloaded(program, choice),))
        return max(0, peak_activations(plan, depth=choice.depth)[0] - most_held)

    def wait_s(choice: OffloadChoice) -> float:
        return waits_s(offloaded(program, choice), measured, choice.depth)

    def fewest(depth: int) -> int:
        """Return the least number to offload so that the rest fits; all if even this is too few."""
        choices = [OffloadChoice(number, depth) for number in range(most)]
        return bisect_left(choices, True, key=lambda choice: not too_many(choice))

    def most_hidden(depth: int, needed: int) -> int:
        """Return the largest number up to ``needed`` with which no computation waits."""

        def waits(number: int) -> bool:
            return wait_s(OffloadChoice(number, depth)) > _HIDDEN * computed_s

        return bisect_left(range(1, needed), True, key=waits) if waits(needed) else needed

    if not sparing:
        all_s: dict[OffloadChoice, float] = {}
        for choice in (OffloadChoice(None, depth) for depth in _DEPTHS):
            if all_s and too_many(choice):
                break
            all_s[choice] = wait_s(choice)
        enough_s = min(all_s.values()) + _HIDDEN * computed_s
        return next(choice for choice in all_s if all_s[choice] <= enough_s)
    left: dict[OffloadChoice, int] = {}
    for depth in _DEPTHS:
        choice = OffloadChoice(most_hidden(depth, fewest(depth)), depth)
        left[choice] = too_many(choice)
        if not left[choice]:
            return choice
    best = min(left, key=lambda choice: (left[choice], choice.depth))
    logger.warning(
        "--offload-activations auto: the device has memory for %d activations; with the copies "
        "that compute hides, of %d, it holds up to %d; --offload-activations on moves all of them",
        *(most_held, best.at_most, most_held + left[best]),
    )
    return best


def waits_s(program: Program, measured: OffloadTimes, depth: int) -> float:
    """Return how long a rank's computations wait for copies, in seconds.

    A copy is issued when the earlier computations have ended. A backward waits for the reload of
    its activations. The computation ``depth`` positions after an OFFLOAD waits for this copy, which
    frees memory.
    """
    streams = CopyStreams()
    now_s = computed_s = 0.0
    leaving_s = deque([0.0] * depth)
    there_s: dict[tuple[int, int | None], float] = {}
    for action in program:
        stage, op, microbatch = action
        if op is Op.OFFLOAD:
            start_s = streams.start_copy(action, now_s, measured.offload_s)
            leaving_s[-1] = start_s + measured.offload_s
        elif op is Op.RELOAD:
            start_s = streams.start_copy(action, now_s, measured.reload_s)
            there_s[stage, microbatch] = start_s + measured.reload_s
        elif op is Op.FORWARD or op is Op.BACKWARD:
            if op is Op.BACKWARD:
                now_s = max(now_s, there_s.get((stage, microbatch), 0.0))
            length_s = measured.forward_s if op is Op.FORWARD else measured.backward_s
            computed_s += length_s
            now_s = max(now_s + length_s, leaving_s.popleft())
            leaving_s.append(0.0)
    return now_s - computed_s
