"""The order of a segment's weight gradients if they are reduced to shards as they become complete.

A reduce-scatter sums equally many gradients of every shard. So parameters should complete the
shards in turns: the next one is the smallest that is in the shard with the fewest gradients.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

MOST_BALANCED = 4  # replicas whose shards are reduced together; with more, each to its owner
_LAYER = (4, 4, 3, 1)  # the sizes of a transformer layer's weights, the last one first

Sizes = Sequence[Sequence[int]]
"""Of some parameters, in any order: how many gradients lie in each shard."""


def in_shards(begin: int, end: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(shard, begin, end)`` for what lies in each shard of ``size`` gradients."""
    for shard in range(begin // size, -(-end // size)):
        yield shard, max(begin, shard * size), min(end, (shard + 1) * size)


def in_turns(sizes: Sequence[int], there: Sizes) -> list[int]:
    """Return the order of parameters, as indices."""
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
    """Return which share of a segment's reduction has started after which share of the work.

    It is that of equal transformer layers. If each part is reduced to its owner, the shares are
    equal, and the result is empty.
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
