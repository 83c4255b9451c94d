"""Simulate the iterations among which `policy.num_segments` chooses."""

from collections.abc import Callable, Iterable

from megatron.fold3d.plan.compile import Options, lower
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.policy.num_segments import Segments, by_iteration_time
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.execution import Execution
from megatron.fold3d.predict.simulator.steady import TOLERANCE, steady_state


def by_simulation(
    options: Iterable[int],
    costs: Callable[[int], Costs],
    *,
    num_ranks: int,
    num_microbatches: int,
    schedule: str = "aiao",
    deferred: bool = True,
    preemptive: bool = True,
) -> Segments:
    """Return the number of segments with the shortest steady iteration.

    Args:
        options: numbers of segments that divide the layers; of equals, the lowest is taken.
        costs: of the stages, for each number of segments.
        num_ranks: of the pipeline.
        num_microbatches: per iteration.
        schedule: that orders the computations.
        deferred: whether DP.sync may reach into the next iteration.
        preemptive: whether PP.sync goes before DP.sync on a link.
    """
    execution = Execution(
        grad_sync_order="edf" if deferred else "fifo",
        preemptive=preemptive,
        flush=not deferred,
        in_order=True,
    )
    periods: dict[int, float] = {}
    for segments in sorted(options):
        order = build(
            schedule,
            num_ranks=num_ranks,
            num_segments=segments,
            num_microbatches=num_microbatches,
        )
        stages = range(order.num_stages if deferred else 0)
        plan = lower(order, Options(transfers=False, deferred_stages=stages))
        periods[segments] = steady_state(plan, costs(segments), execution).period_s
    return by_iteration_time(periods, TOLERANCE)
