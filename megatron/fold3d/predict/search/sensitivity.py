"""The sensitivity of a predicted gain: how it changes if an assumption is off by half."""

from collections.abc import Iterator
from dataclasses import replace

from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.search.candidate_estimate import estimate_of
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.candidates import Candidate


def gains_if_off_by_half(
    shape: ModelShape, cluster: Cluster, ours: Candidate, stock: Candidate
) -> Iterator[tuple[str, float]]:
    """Yield each assumption as it would be, and by how much ours is then faster than stock.

    The two configurations stay; with other numbers a search might find others.

    Args:
        shape: the model.
        cluster: the cluster, with the efficiencies that are assumed.
        ours: the fastest of ours.
        stock: the fastest of stock Megatron.
    """

    def seconds(candidate: Candidate, on: Cluster, *, waits: bool = True) -> float:
        known = estimate_of(shape, on, candidate)
        return timeline_of(candidate, known, waits_for_sends=waits).period_s

    ours_s = seconds(ours, cluster)
    blocked_s, free_s = seconds(stock, cluster), seconds(stock, cluster, waits=False)
    yield "stock waits half as long for its sends", (blocked_s + free_s) / 2 / ours_s - 1
    for name, what in (("nic_efficiency", "NICs achieve"), ("compute_efficiency", "GPUs achieve")):
        value: float = getattr(cluster, name)
        for other in dict.fromkeys((value / 2, min(1.0, value * 1.5))):
            changed = replace(cluster, **{name: other})  # type: ignore[arg-type]
            gain = seconds(stock, changed) / seconds(ours, changed) - 1
            yield f"{what} {other:.0%} instead of {value:.0%}", gain
