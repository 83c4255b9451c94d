"""Which activations a rank offloads and how early it reloads them, chosen from measured times.

Each rank chooses for itself, since its copies to and from the host do not affect other ranks.
"""

import logging
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from megatron.fold3d.plan.ir import Action, Op, Plan, Program
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.ops import COPY_OPS, TABLE, Place
from megatron.fold3d.plan.passes.offload import OffloadChoice, add_offload
from megatron.fold3d.policy.measured_times import usable_bytes

logger = logging.getLogger(__name__)

_HIDDEN = 0.01  # waits for copies below this share of compute time count as none
_MOST_DEPTH = 8
_Key = tuple[int, int | None]  # stage, micro-batch


class CopyStreams:
    """The two copy streams of a rank, one for each direction, also for the simulator.

    All times are seconds from one arbitrary origin. If streams share hardware queues, the rules of
    `megatron.fold3d.plan.device_queues` apply as well.

    compute     F0        F1        F2        ...  B1        B0
    to host        [OFFLOAD0 ][OFFLOAD1 ]
    to device                                 [RELOAD1 ][RELOAD0 ]
    """

    def __init__(self) -> None:
        self._free_s = dict.fromkeys(COPY_OPS, 0.0)  # when a stream's last copy ends
        self._on_host_s: dict[_Key, float] = {}  # when an activation's last OFFLOAD ends

    def start_copy(self, copy: Action, now_s: float, seconds: float) -> float:
        """Return when a copy starts that is issued at ``now_s`` and takes ``seconds``.

        It starts when the copies before it on its stream have ended. A RELOAD starts no earlier
        than the end of its activation's OFFLOAD.
        """
        stage, op, microbatch = copy
        start_s = max(now_s, self._free_s[op])
        leaves = TABLE[op].place is Place.TO_HOST
        if not leaves:
            start_s = max(start_s, self._on_host_s.get((stage, microbatch), 0.0))
        end_s = self._free_s[op] = start_s + seconds
        if leaves:
            self._on_host_s[stage, microbatch] = end_s
        return start_s


@dataclass(frozen=True, slots=True)
class OffloadTimes:
    """An iteration's measurements: times in seconds, sizes in bytes.

    Attributes:
        activation_bytes: the bytes of the largest activation, that of one (segment, micro-batch).
        held: the most of them on the device at once.
        spare_bytes: device memory that was never used; None where the device has none of its own.
        forward_s: one forward.
        backward_s: one backward.
        offload_s: one activation's copy to the host.
        reload_s: its copy back.
    """

    activation_bytes: int
    held: int
    spare_bytes: int | None
    forward_s: float
    backward_s: float
    offload_s: float
    reload_s: float


def offloaded(program: Program, choice: OffloadChoice) -> Program:
    """Return a rank's program with the OFFLOADs and RELOADs of a choice."""
    plan = add_offload(Plan((program,)), depth=choice.depth, at_most=choice.at_most)
    return plan.programs[0]


def choose_offload(program: Program, measured: OffloadTimes, *, sparing: bool) -> OffloadChoice:
    """Return how many activations to offload, and the smallest depth that hides their copies.

    Args:
        program: the computations of a rank.
        measured: the times and bytes that this rank has measured.
        sparing: offload no more than memory requires, and only as much as computations hide;
            otherwise offload all.
    """
    if measured.spare_bytes is None:
        # On a CPU the memory is the host's, and copies are synchronous.
        return OffloadChoice(0 if sparing else None)
    most_held = measured.held + int(usable_bytes(measured.spare_bytes)) // measured.activation_bytes
    return _spare(program, measured, most_held) if sparing else _all(program, measured, most_held)


def waits_s(program: Program, measured: OffloadTimes, depth: int) -> float:
    """Return how long a rank's computations wait for copies, in seconds.

    A copy is issued when the computations before it have ended. A computation waits for the reload
    of the activations that it reads. The computation ``depth`` positions after an OFFLOAD waits for
    that copy, which frees memory.
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


def _all(program: Program, measured: OffloadTimes, most_held: int) -> OffloadChoice:
    """Offload everything, at the smallest depth that hides nearly as much as memory allows."""
    waits: dict[int, float] = {}
    for depth in range(1, _MOST_DEPTH + 1):
        if depth > 1 and _peak(program, OffloadChoice(None, depth)) > most_held:
            break
        waits[depth] = waits_s(offloaded(program, OffloadChoice(None, depth)), measured, depth)
    enough_s = min(waits.values()) + _HIDDEN * _computed_s(program, measured)
    return OffloadChoice(None, min(depth for depth, wait_s in waits.items() if wait_s <= enough_s))


def _spare(program: Program, measured: OffloadTimes, most_held: int) -> OffloadChoice:
    """Offload no more than memory requires, at the smallest depth that hides the copies."""
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
        "that compute hides, of %d, it holds up to %d; --offload-activations on moves all of them",
        *(most_held, best.at_most, most_held + too_many[best]),
    )
    return best


def _fewest(program: Program, depth: int, most_held: int) -> int:
    """Return the fewest to offload so that at most ``most_held`` activations are on the device.

    If even offloading all leaves more on the device, return all.
    """
    most = sum(action.op is Op.FORWARD for action in program)

    def fits(at_most: int) -> bool:
        return _peak(program, OffloadChoice(at_most, depth)) <= most_held

    return bisect_left(range(most), True, key=fits)


def _most_hidden(program: Program, measured: OffloadTimes, depth: int, needed: int) -> int:
    """Return how many can be offloaded, up to ``needed``, so that no computation waits."""
    enough_s = _HIDDEN * _computed_s(program, measured)

    def is_hidden(at_most: int) -> bool:
        copied = offloaded(program, OffloadChoice(at_most, depth))
        return waits_s(copied, measured, depth) <= enough_s

    if is_hidden(needed):
        return needed
    return bisect_left(range(1, needed), True, key=lambda at_most: not is_hidden(at_most))


def _peak(program: Program, choice: OffloadChoice) -> int:
    return peak_activations(Plan((offloaded(program, choice),)), depth=choice.depth)[0]


def _computed_s(program: Program, measured: OffloadTimes) -> float:
    return sum(
        measured.forward_s if action.op is Op.FORWARD else measured.backward_s for action in program
    )
