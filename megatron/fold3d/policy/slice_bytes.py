"""How many bytes of gradients are reduced at once where transfers go first."""

from math import ceil, log2

_SMALLEST = 64 << 10  # bytes
_LOSS = 0.02  # the part of DP.sync's time that may go into starting slices


def slice_bytes(transfer_bytes: int, at_most: int, per_byte_s: float, start_s: float) -> int:
    """Return a quarter of a transfer, or more where starting slices would cost too much.

    A transfer that arrives during a quarter takes at most a quarter longer. A size that follows
    from measured times is rounded up to a power of two, so that runs on one network cut alike: sums
    over more than two replicas depend on the cuts.
    """
    quarter = max(transfer_bytes // 4 // 4096 * 4096, _SMALLEST)
    if quarter * per_byte_s * _LOSS < start_s:
        quarter = 1 << ceil(log2(start_s / _LOSS / per_byte_s))
    return min(quarter, at_most)
