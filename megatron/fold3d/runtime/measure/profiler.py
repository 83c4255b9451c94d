"""Measure how many seconds the parts of a run take on its own hardware.

All ranks of the job measure at the same time, since they will also compute and send at the same
time, and the slowest counts. All ranks call the functions in the same order.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from megatron.fold3d.runtime.device import pinned_bytes, synchronize

_ROUNDS = 5
_WARM_UP = 2
_SMALL_BYTES, _LARGE_BYTES = 1 << 16, 1 << 22


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of ``work``, with the device synchronized before and after it."""
    times_s = []
    for _ in range(_WARM_UP + _ROUNDS):
        synchronize(device)
        start_s = time.perf_counter()
        work()
        synchronize(device)
        times_s.append(time.perf_counter() - start_s)
    return median(times_s[_WARM_UP:])


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the element-wise maximum of ``values`` over all ranks of the job."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found.tolist()]


def message(
    pp_group: dist.ProcessGroup, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Return a message's transfer time without latency, and the latency.

    Every rank sends to the next one at the same time.
    """
    ranks = dist.get_process_group_ranks(pp_group)
    here, num_ranks = pp_group.rank(), pp_group.size()
    after, before = ranks[(here + 1) % num_ranks], ranks[here - 1]

    def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
        # Receives first: over gloo a receive's announcement would queue behind bulk data.
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, received, before, pp_group),
                dist.P2POp(dist.isend, sent, after, pp_group),
            ]
        ):
            work.wait()

    def timed(tensor: torch.Tensor) -> float:
        received = torch.empty_like(tensor)
        return seconds(lambda: exchange(tensor, received), device)

    latency_s = timed(torch.zeros(1, device=device))
    whole_s = timed(torch.zeros(tuple(shape), dtype=dtype, device=device))
    return max(0.0, whole_s - latency_s), latency_s


def grad_sync(dp_group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Return an all-reduce's seconds per byte, and its seconds at zero bytes."""
    if dp_group.size() == 1:
        return 0.0, 0.0

    def timed(num_bytes: int) -> float:
        data = torch.zeros(num_bytes // 4, device=device)
        return seconds(lambda: dist.all_reduce(data, group=dp_group), device)

    small_s, large_s = timed(_SMALL_BYTES), timed(_LARGE_BYTES)
    per_byte_s = max(0.0, large_s - small_s) / (_LARGE_BYTES - _SMALL_BYTES)
    return per_byte_s, max(0.0, small_s - per_byte_s * _SMALL_BYTES)


def host_copy_bytes_per_s(device: torch.device) -> float:
    """Return the bandwidth of copies from the device to pinned host memory."""
    data = torch.zeros(_LARGE_BYTES, dtype=torch.uint8, device=device)
    host = pinned_bytes(_LARGE_BYTES, device)
    return _LARGE_BYTES / seconds(lambda: host.copy_(data, non_blocking=True), device)
