"""How long work takes on a device, and how all ranks of a job agree on a number.

All ranks of the job measure at the same time, because they will also compute and send at the same
time. The slowest rank counts. All ranks call the functions in the same order.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from megatron.fold3d.runtime.device import synchronize

_WARM_UP = 2


def seconds(work: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Return the median time of ``work``, with the device synchronized before and after it."""
    times_s = []
    for _ in range(_WARM_UP + rounds):
        passed_s = clock(device)
        work()
        times_s.append(passed_s())
    return median(times_s[_WARM_UP:])


def clock(device: torch.device) -> Callable[[], float]:
    """Start a clock once the device is idle; the returned function reads it, once idle again."""
    synchronize(device)
    began_s = time.perf_counter()

    def passed_s() -> float:
        synchronize(device)
        return time.perf_counter() - began_s

    return passed_s


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the element-wise maximum of ``values`` over all ranks of the job."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found.tolist()]


def gathered[T](mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return ``mine`` of each rank of the job, or of a group, by rank."""
    everyones = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group)
    return everyones
