"""Simulate the iterations among which `policy.num_segments` and `policy.partition` choose."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Features
from megatron.fold3d.policy.num_segments import Segments, by_iteration_time
from megatron.fold3d.policy.partition import Layers, Partition, best_partition, layers_of_stages
from megatron.fold3d.predict.search.judge import Judge
from megatron.fold3d.predict.search.rank_work import rank_times
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.simulate import TOLERANCE

WORTH_UNEVEN = 0.01  # measured times are not better than that
# Layouts simulated for a number of segments: fewer where an iteration has more computations.
_MOST_SIMULATED, _FEWEST_SIMULATED = 40, 4
_MOST_FORWARDS = 20_000  # of all that are simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The iterations that are compared.

    Attributes:
        num_ranks: pipeline ranks.
        num_microbatches: per iteration.
        schedule: the schedule.
        deferred: whether DP.sync may reach into the next iteration.
    """

    num_ranks: int
    num_microbatches: int
    schedule: str = "aiao"
    deferred: bool = True

    def timeline(self, num_segments: int, costs: Costs) -> Timeline:
        """Return iterations until they are steady."""
        choice = Choice.plain(self.schedule, num_segments, share=1.0)
        judge = Judge(
            choice=choice.changed(step="next" if self.deferred else "end"),
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            costs=costs,
            features=Features(transfers=False),
            link=Link(grad_sync_order="edf" if self.deferred else "fifo", preemptive=False),
        )
        return judge.simulated().timeline


def by_simulation(
    options: Iterable[int], costs: Callable[[int], Costs], pipeline: SimulatedRun
) -> Segments:
    """Return the number of segments with the shortest steady iteration.

    Args:
        options: numbers of segments that divide the layers; of equals, the lowest is taken.
        costs: returns the costs of the stages, for each number of segments.
        pipeline: the pipeline to simulate.
    """
    return by_iteration_time(
        {n: pipeline.timeline(n, costs(n)).period_s for n in sorted(options)}, TOLERANCE
    )


def with_layers(
    options: Iterable[int],
    num_layers: int,
    costs: Callable[[Layers], Costs],
    pipeline: SimulatedRun,
    fits: Callable[[Timeline, Layers, Layers], bool] = lambda *_: True,
) -> Segments:
    """Return the number of segments and the layers of stages with the shortest steady iteration.

    Layers are uneven only where that gains 1%, or where no number of segments divides them.

    Args:
        options: numbers of segments.
        num_layers: layers of the model, at least as many as there are stages.
        costs: returns the costs of the stages, from their layers.
        pipeline: the pipeline to simulate.
        fits: whether memory has room, from iterations of the same order, the layers, and those
            that are as even as possible.
    """
    ranks = pipeline.num_ranks
    most_even = {n: layers_of_stages(num_layers, ranks, n) for n in sorted(options)}
    timelines = {n: pipeline.timeline(n, costs(layers)) for n, layers in most_even.items()}
    even_s = {n: timelines[n].period_s for n, each in most_even.items() if len(set(each)) == 1}
    chosen = by_iteration_time(even_s, TOLERANCE) if even_s else None

    def partition(num_segments: int) -> Partition:
        start, timeline = most_even[num_segments], timelines[num_segments]

        def iteration_s(layers: Layers) -> float:
            if layers == start:
                return timeline.period_s
            if not fits(timeline, layers, start):  # what is held when depends on the order alone
                return inf
            return pipeline.timeline(num_segments, costs(layers)).period_s

        most = _MOST_FORWARDS // (len(start) * pipeline.num_microbatches)
        return best_partition(
            start,
            iteration_s=iteration_s,
            times=rank_times(costs, start, ranks, pipeline.num_microbatches),
            most_simulated=max(_FEWEST_SIMULATED, min(most, _MOST_SIMULATED)),
        )

    found = {n: partition(n) for n in most_even}
    best, layout = min(found.items(), key=lambda item: item[1].iteration_s)
    if chosen is not None:
        least_s = even_s[chosen.num_segments]
        if not layout.iteration_s <= least_s * (1 - WORTH_UNEVEN):
            return chosen
    if len(set(layout.layers)) == 1:
        return by_iteration_time({best: layout.iteration_s}, 0.0)
    how = "none is better" if layout.is_exact else f"the best of {layout.simulated} that were tried"
    reason = f"layers {','.join(map(str, layout.layers))} take {layout.iteration_s:.3g} s, {how}"
    if chosen is not None:
        reason += f"; even ones: {chosen.reason}"
    return Segments(num_segments=best, reason=reason, layers=layout.layers)
