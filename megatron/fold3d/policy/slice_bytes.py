"""The size of DP.sync's slices with ``--preemptive-comm``."""

from math import ceil, log2

_SMALLEST = 64 << 10  # bytes
_LOSS = 0.02  # the part of DP.sync's time that may go into starting slices


def slice_bytes(transfer_bytes: int, at_most: int, per_byte_s: float, start_s: float) -> int:
    """Return a quarter of a transfer's size, or more if starting slices would cost too much.

    A transfer then waits for a slice for at most a quarter of its own time. A size from measured
    times is rounded up to a power of two, so that all runs on one network make the same slices:
    sums over more than two replicas depend on them.
    """
    if per_byte_s <= 0:  # one replica reduces nothing
        return at_most
    quarter = max(transfer_bytes // 4 // 4096 * 4096, _SMALLEST)
    if quarter * per_byte_s * _LOSS < start_s:
        quarter = 1 << ceil(log2(start_s / _LOSS / per_byte_s))
    return min(quarter, at_most)
