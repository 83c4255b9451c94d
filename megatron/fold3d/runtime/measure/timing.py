"""How long work takes on a device.

All ranks of the job measure at the same time, because they will also compute and send at the same
time.
"""

import time
from collections.abc import Callable
from statistics import median

import torch

from megatron.fold3d.runtime.device import synchronize


def seconds(
    work: Callable[[], object], device: torch.device, rounds: int = 5, *, warm_up: int = 2
) -> float:
    """Return the median time of ``work``, with the device synchronized before and after it.

    Args:
        warm_up: the rounds before, which do not count. The first may load a library, or connect.
    """
    times_s = []
    for _ in range(warm_up + rounds):
        passed_s = clock(device)
        work()
        times_s.append(passed_s())
    return median(times_s[warm_up:])


def clock(device: torch.device) -> Callable[[], float]:
    """Start a clock once the device is idle; the returned function reads it, once idle again."""
    synchronize(device)
    began_s = time.perf_counter()

    def passed_s() -> float:
        synchronize(device)
        return time.perf_counter() - began_s

    return passed_s
