"""The size of DP.sync's slices with ``--preemptive-comm``, from measurements.

Keeps one invariant: every rank of the job gets the same size, so all make the same slices.
"""

import logging

import torch
import torch.distributed as dist

from megatron.fold3d.policy.grad_sync_cuts import slice_bytes
from megatron.fold3d.runtime.measure.lanes import all_reduces, message_s

logger = logging.getLogger(__name__)

_LARGE = 1 << 20  # bytes


def measured(
    transfer_bytes: int, at_most: int, dp_group: dist.ProcessGroup, device: torch.device
) -> int:
    """Return the slice size in bytes that suits transfers of ``transfer_bytes`` on this network.

    All ranks of the job call this together. They measure at the same time, and the slowest counts.
    """
    # The launch cost is the time of a one-element all-reduce. The difference of two sizes would not
    # show it: a link may let the first bytes of each message through at once.
    element = torch.zeros(1, device=device)
    launch_s = message_s(lambda: dist.all_reduce(element, group=dp_group), device)
    per_byte_s = all_reduces(dp_group, _LARGE, device).s_per_byte
    num_bytes = slice_bytes(transfer_bytes, at_most, per_byte_s, launch_s)
    if dist.get_rank() == 0:
        logger.info(
            "DP.sync in slices of %s bytes: to start one takes %.3g ms, a byte %.3g ns; "
            "--schedule ...:slice-bytes=%s repeats it",
            num_bytes,
            1e3 * launch_s,
            1e9 * per_byte_s,
            num_bytes,
        )
    return num_bytes
