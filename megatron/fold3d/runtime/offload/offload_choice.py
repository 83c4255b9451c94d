"""Which activations of a rank leave and how early they come back, chosen from measured times.

Each rank chooses for itself: an activation's way to the host and back concerns no other rank.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch

from megatron.fold3d.plan.ir import Op, Plan, Program
from megatron.fold3d.plan.passes.offload import OffloadChoice, add_offload
from megatron.fold3d.plan.verify import peak_activations
from megatron.fold3d.runtime.device import Clock, Mark

logger = logging.getLogger(__name__)

CAUTION = 0.9
"""Of memory that is left over: fragments, other processes, and iterations that differ."""
_TIMED = (Op.FORWARD, Op.BACKWARD, Op.OFFLOAD, Op.RELOAD)
_HIDDEN = 0.01  # of the computations' time; a shorter wait for copies counts as none
_MOST_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """What an iteration took.

    Attributes:
        activation_bytes: of one (segment, micro-batch), the largest.
        held: the most of them on the device at once.
        spare_bytes: device memory that was never used; None where the device has no own.
        forward_s: one forward.
        backward_s: one backward.
        offload_s: one activation's way to the host.
        reload_s: and back.
    """

    activation_bytes: int
    held: int
    spare_bytes: int | None
    forward_s: float
    backward_s: float
    offload_s: float
    reload_s: float

    @property
    def most_held(self) -> int | None:
        """How many activations the device has memory for; None is any number."""
        if self.spare_bytes is None:
            return None
        return self.held + max(0, int(self.spare_bytes * CAUTION)) // self.activation_bytes


class Meter:
    """Times an iteration's computations and copies on a device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._spans: list[tuple[Op, Mark, Mark]] = []

    def begin(self, op: Op) -> Callable[[], None]:
        """Note that something begins on the current stream; call what is returned at its end."""
        start = self._clock.mark()
        return lambda: self._spans.append((op, start, self._clock.mark()))

    def clear(self) -> None:
        """Forget what was timed so far."""
        self._spans.clear()

    def means_s(self) -> tuple[float, ...] | None:
        """Return the mean of a forward, a backward, a copy to the host and one back.

        None as long as one of them is missing or not over.
        """
        times: dict[Op, list[float]] = {op: [] for op in _TIMED}
        for op, start, end in self._spans:
            if not self._clock.has_passed(end):
                return None
            times[op].append(self._clock.seconds(start, end))
        return tuple(map(fmean, times.values())) if all(times.values()) else None


def offloaded(program: Program, choice: OffloadChoice) -> Program:
    """Return a rank's program with the copies of a choice."""
    plan = add_offload(Plan((program,)), depth=choice.depth, at_most=choice.at_most)
    return plan.programs[0]


def choose(program: Program, measured: Measured, *, sparing: bool) -> OffloadChoice:
    """Return what should leave, and the fewest computations that hide its copies.

    Args:
        program: the computations of a rank.
        measured: on this rank.
        sparing: no more leaves than memory needs, nor than computations hide; otherwise all does.
    """
    most_held = measured.most_held
    if most_held is None:
        # A CPU: memory is the host's, and copies are over when their calls return.
        return OffloadChoice(0 if sparing else None)
    return _spare(program, measured, most_held) if sparing else _all(program, measured, most_held)


def waits_s(program: Program, measured: Measured, depth: int) -> float:
    """Return how long a rank's computations wait for copies, one stream for each way.

    Copies begin when the computations before them are over. A computation waits for what it needs
    back, and the one ``depth`` computations behind an OFFLOAD for the device's memory.
    """
    now_s = computed_s = out_s = back_s = 0.0
    leaving_s = deque([0.0] * depth)
    there_s: dict[tuple[int, int | None], float] = {}
    for stage, op, microbatch in program:
        if op is Op.OFFLOAD:
            leaving_s[-1] = out_s = max(out_s, now_s) + measured.offload_s
        elif op is Op.RELOAD:
            there_s[stage, microbatch] = back_s = max(back_s, now_s) + measured.reload_s
        elif op is Op.FORWARD or op is Op.BACKWARD:
            if op is Op.BACKWARD:
                now_s = max(now_s, there_s.get((stage, microbatch), 0.0))
            length_s = measured.forward_s if op is Op.FORWARD else measured.backward_s
            computed_s += length_s
            now_s = max(now_s + length_s, leaving_s.popleft())
            leaving_s.append(0.0)
    return now_s - computed_s


def _all(program: Program, measured: Measured, most_held: int) -> OffloadChoice:
    """Let everything leave, as deep as memory allows and copies gain from it."""
    waits: dict[int, float] = {}
    for depth in range(1, _MOST_DEPTH + 1):
        if depth > 1 and _peak(program, OffloadChoice(None, depth)) > most_held:
            break
        waits[depth] = waits_s(offloaded(program, OffloadChoice(None, depth)), measured, depth)
    enough_s = min(waits.values()) + _HIDDEN * _computed_s(program, measured)
    return OffloadChoice(None, min(depth for depth, wait_s in waits.items() if wait_s <= enough_s))


def _spare(program: Program, measured: Measured, most_held: int) -> OffloadChoice:
    """Let as few leave as memory needs, as deep as hides their copies; or come nearest to that."""
    too_many: dict[OffloadChoice, int] = {}
    for depth in range(1, _MOST_DEPTH + 1):
        needed = _fewest(program, depth, most_held)
        choice = OffloadChoice(_most_hidden(program, measured, depth, needed), depth)
        too_many[choice] = max(0, _peak(program, choice) - most_held)
        if not too_many[choice]:
            return choice
    best = min(too_many, key=lambda choice: (too_many[choice], choice.depth))
    logger.warning(
        "--offload-activations auto: the device has memory for %d activations; with the copies "
        "that compute hides, of %d, it holds up to %d; give on to move all of them",
        *(most_held, best.at_most, most_held + too_many[best]),
    )
    return best


def _fewest(program: Program, depth: int, most_held: int) -> int:
    """Return the fewest that must leave so that at most ``most_held`` are on the device.

    All, if they are more even then.
    """
    low, high = 0, sum(action.op is Op.FORWARD for action in program)
    while low < high:
        middle = (low + high) // 2
        if _peak(program, OffloadChoice(middle, depth)) <= most_held:
            high = middle
        else:
            low = middle + 1
    return low


def _most_hidden(program: Program, measured: Measured, depth: int, needed: int) -> int:
    """Return how many can leave, ``needed`` at most, without computations that wait."""
    enough_s = _HIDDEN * _computed_s(program, measured)

    def is_hidden(at_most: int) -> bool:
        return (
            waits_s(offloaded(program, OffloadChoice(at_most, depth)), measured, depth) <= enough_s
        )

    if is_hidden(needed):
        return needed
    low, high = 0, needed - 1
    while low < high:
        middle = (low + high + 1) // 2
        if is_hidden(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _peak(program: Program, choice: OffloadChoice) -> int:
    return peak_activations(Plan((offloaded(program, choice),)), depth=choice.depth)[0]


def _computed_s(program: Program, measured: Measured) -> float:
    return sum(
        measured.forward_s if action.op is Op.FORWARD else measured.backward_s for action in program
    )
