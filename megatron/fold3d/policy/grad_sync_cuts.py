"""Into which pieces DP.sync is cut, and what a message beside one costs it."""

from math import ceil, log2

_SMALLEST = 64 << 10  # bytes of a slice
_LOSS = 0.02  # the part of DP.sync's time that may go into starting slices
RING_BUFFER_BYTES = {"nccl": 4 << 20, "gloo": 1 << 30}
"""By torch's name of the backend: ``NCCL_BUFFSIZE``, of one channel; gloo receives into tensors."""


def cuts_every_segment(*, one_queue: bool, distributed_optimizer: bool) -> bool:
    """Tell whether a run cuts the gradients of every segment, on every rank, into buckets.

    Args:
        one_queue: whether all streams of a GPU share one hardware queue. A segment's buckets are
            launched in a row, and in one queue all but the last block later computation until they
            have ended: see `megatron.fold3d.plan.device_queues`.
        distributed_optimizer: whether the optimizer is distributed. It keeps stock's buckets, since
            they decide its shards.
    """
    return not one_queue and not distributed_optimizer


def slice_bytes(transfer_bytes: int, at_most: int, per_byte_s: float, start_s: float) -> int:
    """Return the size of slices with ``--preemptive-comm``, in bytes.

    It is a quarter of a transfer's, or more if starting slices would cost too much. A transfer
    then waits for a slice for at most a quarter of its own time. A size from measured
    times is rounded up to a power of two, so that all runs on one network make the same slices:
    sums over more than two replicas depend on them.
    """
    if per_byte_s <= 0:  # one replica reduces nothing
        return at_most
    quarter = max(transfer_bytes // 4 // 4096 * 4096, _SMALLEST)
    if quarter * per_byte_s * _LOSS < start_s:
        quarter = 1 << ceil(log2(start_s / _LOSS / per_byte_s))
    return min(quarter, at_most)


def rings_are_buffered(message_bytes: float, backend: str) -> bool:
    """Return True if a ring's buffers hold what one direction is ahead beside a message.

    A ring sends and receives at once. If a message takes a part of the link in one direction, the
    other goes on as far as the ring's buffers hold what it is ahead. So a message that fits into
    them slows the ring down in its own direction alone. Messages that leave a NIC and messages that
    arrive there then cost DP.sync the longer of both times, and otherwise their sum.

    Args:
        backend: torch's name of the library that runs the ring.
    """
    return message_bytes <= RING_BUFFER_BYTES.get(backend, 0)
