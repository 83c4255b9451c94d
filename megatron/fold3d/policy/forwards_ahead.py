"""The number of forwards that 1F1B, and AIAO's last segment, run ahead to hide transfers."""

from math import ceil

_ROUNDING = 1e-9  # a transfer that takes exactly half of a period fits


def forwards_that_hide(forward_s: float, backward_s: float, transfer_s: float) -> int:
    """Return how many forwards a rank must run ahead, per rank behind it, to wait for no transfer.

    A rank in steady state runs one forward and one backward in each period
    ``forward_s + backward_s``. A micro-batch's round trip, from its forward through the next rank
    to its backward, takes at least a period and two transfers. The backward then waits for its
    slot, so the round trip takes a whole number of periods. In each of these periods the rank
    starts another forward.

    Args:
        forward_s: seconds of one micro-batch's forward in one stage, on the slowest rank.
        transfer_s: seconds of one transfer, including its wait for other traffic on the link.
    """
    period_s = forward_s + backward_s
    return 1 + ceil(2 * transfer_s / period_s - _ROUNDING) if period_s else 1
