"""The layout: how many layers each stage holds, chosen by the times of whole iterations.

The first stage has the embedding and the last the head, so equal numbers of layers are not equal
work (Merak Sec. 4). The search starts from the most even layout, or from one in which ranks compute
equally long. It moves one layer at a time from a stage to another, the most promising move first,
until no move helps. A rank's computation is a lower bound on the iteration. If few layouts have a
bound below the best iteration, the search tries all of them, and its result is the optimum.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

Layers = tuple[int, ...]
"""The number of layers of each stage; stage s is segment s // ranks on rank s % ranks."""

MOST_COMPARED = 2000
"""The search tries all layouts that could be better, if they are at most this many."""
_ALIKE = 1e-9  # relative error of sums of the same times in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Lower bounds on each rank's computation, in seconds per micro-batch.

    Attributes:
        layer_s: one layer's forward and backward, the same for all layers.
        rank_s: by rank, forward and backward of its other modules: embedding, head.
    """

    layer_s: float
    rank_s: tuple[float, ...]
    num_microbatches: int

    def iteration_s(self, layers: Layers) -> float:
        """Return a lower bound on the iteration with this layout, in seconds."""
        ranks = len(self.rank_s)
        return self.num_microbatches * max(
            own_s + self.layer_s * sum(layers[rank::ranks])
            for rank, own_s in enumerate(self.rank_s)
        )

    def most_layers(self, rank: int, iteration_s: float) -> float:
        """Return how many layers a rank can compute in an iteration of this length."""
        if not self.layer_s:
            return inf
        return (iteration_s / self.num_microbatches - self.rank_s[rank]) / self.layer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The best layout that was found.

    Attributes:
        is_exact: whether it is the optimum: every other layout was tried or cannot be better.
        simulated: the number of layouts that were tried.
    """

    layers: Layers
    iteration_s: float
    is_exact: bool
    simulated: int


def best_partition(
    start: Layers,
    *,
    iteration_s: Callable[[Layers], float],
    times: RankTimes | None,
    most_simulated: int,
) -> Partition:
    """Return the layout with the shortest iteration that the search finds.

    Every stage keeps at least one layer. Of equal layouts the first one, such as ``start``, wins.

    Args:
        start: the first layout to try, such as the most even one.
        iteration_s: returns a layout's iteration time; infinite if it does not fit into memory.
        times: the ranks' times; None if layers differ, so that no layout is proved to be optimal.
        most_simulated: the most calls of ``iteration_s``.
    """
    known: dict[Layers, float] = {}
    best: Layers = ()
    best_s = inf

    def trials_left() -> int:
        return max(0, most_simulated - len(known))

    def try_layout(layers: Layers) -> bool:
        """Simulate a layout; return whether it is better than all before."""
        nonlocal best, best_s
        seconds = known[layers] = iteration_s(layers)
        is_better = not best or seconds < best_s * (1 - _ALIKE)
        if is_better:
            best, best_s = layers, seconds
        return is_better

    def promising(layouts: Iterable[Layers]) -> Iterator[Layers]:
        """Yield the new layouts that could be better, in the order of their bounds."""
        bounds_s = {layers: times.iteration_s(layers) if times else 0.0 for layers in layouts}
        for layers in sorted(bounds_s, key=bounds_s.__getitem__):
            if bounds_s[layers] >= best_s * (1 - _ALIKE):
                return
            if layers not in known:
                yield layers

    def try_all(times: RankTimes) -> bool:
        """Try all layouts that could be better; return False if there are too many of them."""
        if best_s == inf:
            return False
        most = [
            int(min(sum(start), times.most_layers(rank, best_s * (1 + _ALIKE))))
            for rank in range(len(times.rank_s))
        ]
        layouts = [*islice(_layouts(sum(start), len(start), most), MOST_COMPARED + 1)]
        if len(layouts) > MOST_COMPARED:
            return False
        for layers in promising(layouts):
            if not trials_left():
                return False
            try_layout(layers)
        return True

    try_layout(start)
    if times is not None and most_simulated > 1 and (balanced := _balanced(start, times)) != start:
        try_layout(balanced)
    while any(map(try_layout, islice(promising(_moves(best)), trials_left()))):
        pass
    is_exact = times is not None and try_all(times)
    return Partition(layers=best, iteration_s=best_s, is_exact=is_exact, simulated=len(known))


def _balanced(start: Layers, times: RankTimes) -> Layers:
    """Return the layout with as many layers in which the slowest rank computes shortest.

    A rank's stages have equal numbers of layers, except that its first stages may have one more.
    """
    ranks = len(times.rank_s)
    segments = len(start) // ranks
    of_rank = [segments] * ranks  # one layer for each stage
    for _ in range(sum(start) - len(start)):
        idlest = min(range(ranks), key=lambda r: times.rank_s[r] + times.layer_s * of_rank[r])
        of_rank[idlest] += 1
    return over_segments(of_rank, segments)


def layers_of_stages(num_layers: int, num_ranks: int, num_segments: int) -> Layers:
    """Return the most even layout over ranks, and within a rank over its stages.

    The remainder goes to the ranks in the middle, since the first rank has the embedding and the
    last rank the head. Within a rank the remainder goes to the first segments.
    """
    each, left = divmod(num_layers, num_ranks)
    order = [*range(1, num_ranks - 1), 0, num_ranks - 1]
    of_rank = [each] * num_ranks
    for rank in order[:left] if num_ranks > 1 else ():
        of_rank[rank] += 1
    return over_segments(of_rank, num_segments)


def over_segments(of_rank: Sequence[int], num_segments: int) -> Layers:
    """Spread each rank's layers over its stages; a rank's first stages may have one more."""
    return tuple(
        layers // num_segments + (segment < layers % num_segments)
        for segment in range(num_segments)
        for layers in of_rank
    )


def _moves(layers: Layers) -> Iterator[Layers]:
    """Yield the layouts in which one layer has moved from a stage to another."""
    for source, count in enumerate(layers):
        for target in range(len(layers) if count > 1 else 0):
            if source != target:
                moved = list(layers)
                moved[source] -= 1
                moved[target] += 1
                yield tuple(moved)


def _layouts(
    num_layers: int, num_stages: int, most: Sequence[int], begun: Layers = ()
) -> Iterator[Layers]:
    """Yield all layouts with at least one layer per stage and at most ``most`` layers per rank.

    Args:
        num_layers: layers that are left for the stages after ``begun``.
        most: the most layers that each rank may get in addition to ``begun``.
        begun: layers of the first stages.
    """
    if not num_stages:
        if not num_layers:
            yield begun
        return
    ranks = {stage % len(most) for stage in range(len(begun), len(begun) + num_stages)}
    if num_layers > sum(most[rank] for rank in ranks):  # too many for the remaining stages
        return
    rank = len(begun) % len(most)
    for count in range(1, num_layers - num_stages + 2):
        if count > most[rank]:
            return
        left = [*most[:rank], most[rank] - count, *most[rank + 1 :]]
        yield from _layouts(num_layers - count, num_stages - 1, left, (*begun, count))
