"""How far ahead 1F1B, and the last segment of AIAO, run: from times of computation and transfer."""

from math import ceil

_ROUNDING = 1e-9  # a transfer that takes exactly half of a period fits


def forwards_that_hide(forward_s: float, backward_s: float, transfer_s: float) -> int:
    """Return how many forwards a rank runs ahead for each rank behind it, to wait for no transfer.

    A rank that alternates forwards and backwards without a pause has one slot for a forward, and
    one for a backward, in each period ``forward_s + backward_s``. From a forward here to the next
    rank and back to the backward of the same micro-batch it takes at least a period and two
    transfers, and the way ends in a slot: it takes a whole number of periods, and in each of them
    this rank starts another forward.

    Args:
        forward_s: of one micro-batch in one stage, on the slowest rank.
        backward_s: likewise.
        transfer_s: one transfer, with what it waits for others on its link.
    """
    period_s = forward_s + backward_s
    return 1 + ceil(2 * transfer_s / period_s - _ROUNDING) if period_s else 1
