"""How much of each segment's DP.sync fits behind the backward: the r of paper Algorithm 2.

The next forward needs the lowest segment first, but the lowest segment's backward ends last. So the
network always reduces the lowest segment whose gradients are ready: earliest deadline first. A
segment's share is the part that has been reduced when the last backward ends. The order of bytes
within that time makes no difference, since the forward needs none of them earlier.
"""

from bisect import insort
from collections.abc import Sequence
from itertools import pairwise

FIRST_SHARE = 0.5  # the share of every segment until times have been measured


def backward_shares(ready_s: Sequence[float], sync_s: Sequence[float]) -> tuple[float, ...]:
    """Return the share of each segment's DP.sync that fits between its backward and the last one.

    Args:
        ready_s: when each segment's last backward ends, in seconds from any origin.
        sync_s: how long each segment's DP.sync takes on an otherwise idle network.

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
