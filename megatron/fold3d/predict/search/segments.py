"""Simulated iterations, from which `policy.num_segments` and `policy.partition` choose."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.policy.num_segments import Segments, by_iteration_time
from megatron.fold3d.policy.partition import Layers, Partition, best_partition, layers_of_stages
from megatron.fold3d.predict.search.bounds import rank_times
from megatron.fold3d.predict.search.judge import Judge
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.simulate import TOLERANCE

WORTH_UNEVEN = 0.01  # relative error of measured times; uneven layers have to gain more
# Layouts simulated for a number of segments: fewer if an iteration has more computations.
_MOST_SIMULATED, _FEWEST_SIMULATED = 40, 4
_MOST_FORWARDS = 20_000  # in all simulated layouts


def iterations(job: Job, num_segments: int, costs: Costs) -> Timeline:
    """Return iterations of a job until they are steady.

    Args:
        job: the job; all segments take the state of its first segment.
    """
    choice = replace(job.choice, segments=job.choice.segments[:1] * num_segments)
    link = Link(grad_sync_order="edf" if choice.carries else "fifo", preemptive=False)
    return Judge(job=replace(job, choice=choice), costs=costs, link=link).simulated().timeline


def by_simulation(options: Iterable[int], costs: Callable[[int], Costs], job: Job) -> Segments:
    """Return the number of segments with the shortest steady iteration.

    Args:
        options: numbers of segments that divide the layers; the lowest wins a tie.
        costs: returns the costs of the stages for a number of segments.
    """
    return by_iteration_time(
        {n: iterations(job, n, costs(n)).period_s for n in sorted(options)}, TOLERANCE
    )


def with_layers(
    options: Iterable[int],
    num_layers: int,
    costs: Callable[[Layers], Costs],
    job: Job,
    fits: Callable[[Timeline, Layers, Layers], bool] = lambda *_: True,
) -> Segments:
    """Return the number of segments and the layers of stages with the shortest steady iteration.

    Layers are uneven only if that gains `WORTH_UNEVEN`, or if no number of segments divides them.

    Args:
        num_layers: layers of the model, at least as many as there are stages.
        fits: tells whether memory has room, from a timeline of the same order, the layers of
            stages, and the most even layers.
    """
    ranks = job.num_ranks
    most_even = {n: layers_of_stages(num_layers, ranks, n) for n in sorted(options)}
    timelines = {n: iterations(job, n, costs(layers)) for n, layers in most_even.items()}
    even_s = {n: timelines[n].period_s for n, each in most_even.items() if len(set(each)) == 1}
    chosen = by_iteration_time(even_s, TOLERANCE) if even_s else None

    def partition(num_segments: int) -> Partition:
        start, timeline = most_even[num_segments], timelines[num_segments]

        def iteration_s(layers: Layers) -> float:
            if layers == start:
                return timeline.period_s
            if not fits(timeline, layers, start):  # only the order decides when bytes are held
                return inf
            return iterations(job, num_segments, costs(layers)).period_s

        most = _MOST_FORWARDS // (len(start) * job.num_microbatches)
        return best_partition(
            start,
            iteration_s=iteration_s,
            times=rank_times(costs, start, ranks, job.num_microbatches),
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
    how = "no split is faster" if layout.is_exact else f"the best of {layout.simulated} splits"
    reason = f"layers {','.join(map(str, layout.layers))} take {layout.iteration_s:.3g} s, {how}"
    if chosen is not None:
        reason += f"; even ones: {chosen.reason}"
    return Segments(num_segments=best, reason=reason, layers=layout.layers)
