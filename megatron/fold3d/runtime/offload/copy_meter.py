"""Times of an iteration's computations and copies."""

from collections.abc import Callable
from statistics import fmean

import torch

from megatron.fold3d.plan.ir import Op
from megatron.fold3d.plan.ops import BACK, FORTH, TO_DEVICE_OPS, TO_HOST_OPS
from megatron.fold3d.runtime.device import Clock, Mark

_TIMED = (FORTH.compute, BACK.compute, *TO_HOST_OPS, *TO_DEVICE_OPS)


class Meter:
    """Times an iteration's computations and copies on a device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._spans: list[tuple[Op, Mark, Mark]] = []

    def time_op(self, op: Op) -> Callable[[], None]:
        """Start to time ``op`` on the current stream; call the returned function at its end."""
        start = self._clock.mark()
        return lambda: self._spans.append((op, start, self._clock.mark()))

    def clear(self) -> None:
        """Forget what was timed so far."""
        self._spans.clear()

    def means_s(self) -> tuple[float, ...] | None:
        """Return the mean times of a forward, a backward, an offload and a reload.

        Return None if one of the four is missing, or if any of them has not ended.
        """
        times: dict[Op, list[float]] = {op: [] for op in _TIMED}
        for op, start, end in self._spans:
            if not self._clock.has_passed(end):
                return None
            times[op].append(self._clock.seconds(start, end))
        return tuple(map(fmean, times.values())) if all(times.values()) else None
