"""The share of each segment's DP.sync that backwards can hide: r of paper Algorithm 2.

The next forward needs the lowest segment first, but the lowest segment's backward ends last. So the
network always reduces the lowest segment whose gradients are ready: earliest deadline first. A
segment's share is the part of its DP.sync that has ended when the last backward ends. The order of
DP.sync before that time makes no difference, since the next forward comes later.
"""

from bisect import insort
from collections.abc import Sequence
from itertools import pairwise

FIRST_SHARE = 0.5  # the share of every segment before times are measured


def backward_shares(ready_s: Sequence[float], sync_s: Sequence[float]) -> tuple[float, ...]:
    """Return the share of each segment's DP.sync that ends before the rank's last backward does.

    Args:
        ready_s: when each segment's last backward ends, in seconds from any origin.
        sync_s: seconds of each segment's DP.sync on an otherwise idle network.

    Returns:
        A number from 0 to 1 for each segment; 0 for the segment whose backward ends last.
    """
    left_s = list(sync_s)
    waiting: list[int] = []
    for segment, following in pairwise(sorted(range(len(ready_s)), key=ready_s.__getitem__)):
        insort(waiting, segment)
        window_s = ready_s[following] - ready_s[segment]
        for urgent in waiting:
            served_s = min(left_s[urgent], window_s)
            left_s[urgent] -= served_s
            window_s -= served_s
    return tuple(
        1 - left / whole if whole else 1.0 for left, whole in zip(left_s, sync_s, strict=True)
    )
