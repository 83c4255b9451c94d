"""The pieces into which DP.sync is cut, and the slowdown of DP.sync by messages."""

from math import ceil, log2

_SMALLEST = 64 << 10  # bytes of a slice
_LOSS = 0.02  # the part of DP.sync's time that starting slices may take
RING_BUFFER_BYTES = {"nccl": 4 << 20, "gloo": 1 << 30}
"""By torch's name of the backend: one channel's ``NCCL_BUFFSIZE``; gloo receives into tensors."""


def cuts_every_segment(*, one_queue: bool, distributed_optimizer: bool) -> bool:
    """Tell whether a run cuts the gradients of every segment, on every rank, into buckets.

    Args:
        one_queue: whether all streams of a GPU share one hardware queue. A segment's buckets are
            launched in a row. In one queue all buckets but the last block later computation until
            they have ended: see `megatron.fold3d.plan.device_queues`.
        distributed_optimizer: whether the optimizer is distributed. It keeps stock's buckets, since
            buckets decide its shards.
    """
    return not one_queue and not distributed_optimizer


def slice_bytes(transfer_bytes: int, at_most: int, per_byte_s: float, start_s: float) -> int:
    """Return the size of slices with ``--preemptive-comm``, in bytes.

    A slice has a quarter of a transfer's bytes, or more if starting slices would cost too much. A
    transfer then waits for a slice for at most a quarter of its own time. A size from measured
    times is rounded up to a power of two, so that all runs on one network make the same slices, on
    which sums over more than two replicas depend.
    """
    if per_byte_s <= 0:  # one replica reduces nothing
        return at_most
    quarter = max(transfer_bytes // 4 // 4096 * 4096, _SMALLEST)
    if quarter * per_byte_s * _LOSS < start_s:
        quarter = 1 << ceil(log2(start_s / _LOSS / per_byte_s))
    return min(quarter, at_most)


def rings_are_buffered(message_bytes: float, backend: str) -> bool:
    """Return True if a message slows a ring collective down only in the message's direction.

    A ring sends and receives at once. While a message takes a part of the link in one direction,
    the ring's other direction runs ahead until the ring's buffers are full. So a message that fits
    into the buffers slows down only its own direction. Leaving and arriving messages then cost
    DP.sync the longer of their times, and otherwise the sum.

    Args:
        backend: torch's name of the library that runs the ring.
    """
    return message_bytes <= RING_BUFFER_BYTES.get(backend, 0)
