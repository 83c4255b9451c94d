"""The size of DP.sync's slices with ``--preemptive-comm``, from measurements.

Keeps one invariant: every rank of the job gets the same size, so all make the same slices.
"""

import logging

import torch
import torch.distributed as dist

from megatron.fold3d.policy.slice_bytes import slice_bytes
from megatron.fold3d.runtime.measure import profiler

logger = logging.getLogger(__name__)

_LARGE = 1 << 20  # bytes
_MANY = 20


def measured(
    transfer_bytes: int, at_most: int, dp_group: dist.ProcessGroup, device: torch.device
) -> int:
    """Return the slice size in bytes that suits transfers of ``transfer_bytes`` on this network.

    All ranks of the job call this together. They measure at the same time, and the slowest counts.
    """
    # The launch cost is the time of a one-element all-reduce. The difference of two sizes would not
    # show it: a link may let the first bytes of each message through at once.
    element, large = torch.zeros(1, device=device), torch.zeros(_LARGE // 4, device=device)

    def reduce(data: torch.Tensor, times: int) -> float:
        def work() -> None:
            for _ in range(times):
                dist.all_reduce(data, group=dp_group)

        return profiler.seconds(work, device) / times

    cost = profiler.slowest([reduce(large, 1) / _LARGE, reduce(element, _MANY)], device)
    num_bytes = slice_bytes(transfer_bytes, at_most, *cost)
    if dist.get_rank() == 0:
        logger.info(
            "DP.sync in slices of %s bytes: to start one takes %.3g ms, a byte %.3g ns; "
            "--schedule ...:slice-bytes=%s repeats it",
            num_bytes,
            1e3 * cost[1],
            1e9 * cost[0],
            num_bytes,
        )
    return num_bytes
