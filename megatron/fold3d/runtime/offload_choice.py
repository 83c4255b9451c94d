"""How many of a rank's activations ``auto`` sends away, from what an iteration was seen to take."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch

from megatron.fold3d.plan.ir import Op, Plan, Program
from megatron.fold3d.plan.lowering import add_offload
from megatron.fold3d.plan.verify import peak_activations
from megatron.fold3d.runtime.device import Clock, Mark

logger = logging.getLogger(__name__)

_TIMED = (Op.FORWARD, Op.BACKWARD, Op.OFFLOAD, Op.RELOAD)
_CAUTION = 0.9  # of the memory that was left over: fragments, and iterations that differ


@dataclass(frozen=True, slots=True)
class Measured:
    """What an iteration took in which everything left.

    Attributes:
        activation_bytes: of one (segment, micro-batch), the largest.
        spare_bytes: device memory that was never used; None where the device has no own.
        forward_s: one forward.
        backward_s: one backward.
        offload_s: one activation's way to the host.
        reload_s: and back.
    """

    activation_bytes: int
    spare_bytes: int | None
    forward_s: float
    backward_s: float
    offload_s: float
    reload_s: float


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


def choose(program: Program, measured: Measured) -> int:
    """Return how many activations leave: no more than memory needs, nor than compute hides."""
    if measured.spare_bytes is None:
        return 0
    kept = max(0, int(measured.spare_bytes * _CAUTION)) // measured.activation_bytes
    needed = _fewest(program, most_held=_peak(program, None) + kept)
    num_forwards = sum(action.op is Op.FORWARD for action in program)
    hidden = min(
        _that_fit(num_forwards * measured.forward_s, measured.offload_s),
        _that_fit(num_forwards * measured.backward_s, measured.reload_s),
    )
    if needed > hidden:
        logger.warning(
            "--offload-activations auto: memory wants %d activations to leave, compute hides the "
            "copies of %d, and so many leave; give on to move all of them",
            *(needed, hidden),
        )
    return min(needed, hidden)


def _fewest(program: Program, most_held: int) -> int:
    """Return the fewest that must leave so that at most ``most_held`` are on the device."""
    low, high = 0, sum(action.op is Op.FORWARD for action in program)
    while low < high:
        middle = (low + high) // 2
        if _peak(program, middle) <= most_held:
            high = middle
        else:
            low = middle + 1
    return low


def _peak(program: Program, at_most: int | None) -> int:
    return peak_activations(add_offload(Plan((program,)), at_most=at_most))[0]


def _that_fit(seconds: float, one_s: float) -> int:
    return int(seconds / one_s) if one_s > 0 else 1 << 30
