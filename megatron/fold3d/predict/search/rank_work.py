"""Lower bounds of each rank's computation, with which `policy.partition` skips layouts."""

from collections.abc import Callable

from megatron.fold3d.policy.partition import Layers, RankTimes
from megatron.fold3d.predict.simulator.costs import Costs


def rank_times(
    costs_of: Callable[[Layers], Costs],
    start: Layers,
    num_ranks: int,
    num_microbatches: int,
    *,
    may_keep_layers: bool = False,
) -> RankTimes | None:
    """Return lower bounds of each rank's computation, if all layers are alike.

    Args:
        costs_of: a layout.
        start: a layout.
        num_ranks: pipeline ranks.
        num_microbatches: per iteration.
        may_keep_layers: whether a layout decides how many layers are recomputed. Then that is left
            out.

    Returns:
        None if there is no layer to move.
    """
    source = max(range(len(start)), key=lambda stage: start[stage])
    target = (source + 1) % len(start)
    if len(start) == 1 or start[source] == 1:
        return None
    moved = list(start)
    moved[source] -= 1
    moved[target] += 1
    work_s, moved_s = (
        _work_s(costs_of(layers), may_keep_layers) for layers in (start, tuple(moved))
    )
    layer_s = work_s[source] - moved_s[source]
    return RankTimes(
        layer_s=layer_s,
        rank_s=tuple(
            sum(work_s[rank::num_ranks]) - layer_s * sum(start[rank::num_ranks])
            for rank in range(num_ranks)
        ),
        num_microbatches=num_microbatches,
    )


def _work_s(costs: Costs, may_keep_layers: bool) -> list[float]:
    """Return the seconds of one micro-batch in each stage."""
    again_s = costs.recompute_s if may_keep_layers else ()
    rows = zip(
        costs.forward_s, costs.backward_s, again_s or (0.0,) * len(costs.forward_s), strict=True
    )
    return [forward_s + backward_s - recompute_s for forward_s, backward_s, recompute_s in rows]
