"""The order of a segment's weight gradients if parts of them are reduced to shards early.

A reduce-scatter sums equally many gradients of every shard, so all shards should fill up at the
same rate. The next parameter is the smallest with gradients in the emptiest shard.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

MOST_BALANCED = 4  # with more replicas, each part is reduced to its owner instead
_LAYER = (4, 4, 3, 1)  # relative sizes of a transformer layer's weights, the last weight first

Sizes = Sequence[Sequence[int]]
"""By parameter and shard: how many of the parameter's gradients lie in the shard."""


def in_shards(begin: int, end: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(shard, begin, end)`` for the part of a range in each shard of ``size`` gradients."""
    for shard in range(begin // size, -(-end // size)):
        yield shard, max(begin, shard * size), min(end, (shard + 1) * size)


def in_turns(sizes: Sequence[int], there: Sizes) -> list[int]:
    """Return the order of parameters as indices, from their sizes, whole and by shard."""
    complete = [0] * max(map(len, there), default=0)
    left, order = list(range(len(sizes))), list[int]()
    while left:
        fewest = min(complete)
        behind = [shard for shard, number in enumerate(complete) if number == fewest]
        helps = {i: sum(there[i][shard] for shard in behind) for i in left}
        best = min(left, key=lambda i: (not helps[i], sizes[i], -helps[i]))
        left.remove(best)
        order.append(best)
        complete = [a + b for a, b in zip(complete, there[best], strict=True)]
    return order


def started_shares(num_layers: int, num_replicas: int) -> tuple[tuple[float, float], ...]:
    """Return pairs: a share of the weight gradients' work, and the share of the reduction started.

    They hold for equal transformer layers. The result is empty if both shares are always equal, as
    where each part is reduced to its owner.
    """
    if not 1 < num_replicas <= MOST_BALANCED or not num_layers:
        return ()
    sizes = [size * num_replicas for size in _LAYER * num_layers]
    whole = sum(sizes)
    there = [[0] * num_replicas for _ in sizes]
    for i, (begin, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        for shard, first, last in in_shards(begin, end, whole // num_replicas):
            there[i][shard] = last - first
    complete, work, found = [0] * num_replicas, 0, list[tuple[float, float]]()
    for i in in_turns(sizes, there):
        work += sizes[i]
        complete = [a + b for a, b in zip(complete, there[i], strict=True)]
        found.append((work / whole, num_replicas * min(complete) / whole))
    return tuple(found)
