"""The sensitivity of a predicted gain to its assumptions, if each is wrong by half."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.candidates import estimate_of
from megatron.fold3d.predict.search.many_microbatches import iteration_s
from megatron.fold3d.predict.search.search_result import JudgedCandidate

_DOCTOR = "measure it with `fold3d doctor --write-cluster FILE`"
_COMPARE = "train 20 iterations of both with scripts/slurm/compare.sbatch"


@dataclass(frozen=True, slots=True)
class Case:
    """The gain of ours over stock under one changed assumption; 0.1 is 10% faster."""

    assumption: str
    gain: float
    decides: str = "how stock and ours differ"
    measure: str = _COMPARE
    """How a user finds out whether the assumption holds."""


def gains_if_off_by_half(
    shape: ModelShape, cluster: Cluster, ours: JudgedCandidate, stock: JudgedCandidate
) -> Iterator[Case]:
    """Yield the gain of ``ours`` over ``stock`` for each assumption that is wrong by half.

    The two configurations stay, although a search with other numbers might find better ones.
    """

    def seconds(judged: JudgedCandidate, on: Cluster, *, waits: bool = True) -> float:
        known = estimate_of(shape, on, judged.candidate)
        simulated = partial(timeline_of, estimate=known, waits_for_sends=waits)
        return iteration_s(judged.candidate, known, simulated)

    unheld_s = seconds(stock, cluster, waits=False)
    ours_s = seconds(ours, cluster, waits=False) if ours.candidate.is_stock else ours.iteration_s
    gain = (stock.iteration_s + unheld_s) / (ours.iteration_s + ours_s) - 1
    assumption = "stock waits half as long for its sends"
    if unheld_s > stock.iteration_s:  # a rank that waits starts nothing else on its links
        assumption += " (they then share links with other traffic)"
    yield Case(assumption, gain, "how long stock waits for its sends")
    for name, what in (("nic_efficiency", "NICs achieve"), ("compute_efficiency", "GPUs achieve")):
        value: float = getattr(cluster, name)
        for other in dict.fromkeys((value / 2, min(1.0, value * 1.5))):
            changed = replace(cluster, **{name: other})  # type: ignore[arg-type]
            if name == "compute_efficiency":  # scales measured layers too
                rows = (
                    (*s, min(1.0, other / value * part)) for *s, part in cluster.layer_efficiencies
                )
                changed = replace(changed, layer_efficiencies=tuple(rows))
            gain = seconds(stock, changed) / seconds(ours, changed) - 1
            assumption = f"{what} {other:.0%} instead of {value:.0%}"
            yield Case(assumption, gain, f"what {what}", _DOCTOR)
