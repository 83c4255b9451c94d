"""Choose the number of segments, by the paper's rule or by simulation.

More segments hide more of DP.sync and shrink the bubble. Each segment also sends every micro-batch
through all ranks once more, and adds its overhead once more.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megatron.fold3d.plan.compile import Options, lower
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.paper.perf_model import overlapping_s
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.execution import Execution
from megatron.fold3d.predict.simulator.steady import TOLERANCE, steady_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """A number of segments and why."""

    num_segments: int
    reason: str


def by_rule(
    options: Iterable[int],
    *,
    compute_s: float,
    message_s: float,
    grad_sync_s: float,
    num_microbatches: int,
) -> Segments:
    """Return the paper's choice (Sec. IV): raise ns as long as what overlaps fits behind compute.

    Args:
        options: numbers of segments that divide the layers.
        compute_s: one iteration's computation of a rank.
        message_s: one micro-batch's message between two ranks.
        grad_sync_s: DP.sync of all of a rank's gradients.
        num_microbatches: per iteration.
    """
    *_, chosen = _fitting(options, compute_s, message_s, grad_sync_s, num_microbatches)
    return chosen


def _fitting(
    options: Iterable[int],
    compute_s: float,
    message_s: float,
    grad_sync_s: float,
    num_microbatches: int,
) -> Iterator[Segments]:
    for index, segments in enumerate(sorted(options)):
        messages_s = 2 * segments * num_microbatches * message_s  # a forward's and a backward's
        hidden_s = overlapping_s(messages_s, grad_sync_s, segments, num_microbatches)
        fits = hidden_s <= compute_s
        if not fits and index:
            return
        verb = "fit" if fits else "do not even fit"
        yield Segments(
            num_segments=segments,
            reason=f"{hidden_s:.3g} s of PP.sync and DP.sync {verb} behind {compute_s:.3g} s of "
            f"computation with {segments} segments",
        )


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
    shortest_s = min(periods.values()) * (1 + TOLERANCE)
    best = next(segments for segments, period_s in periods.items() if period_s <= shortest_s)
    times = ", ".join(f"{segments}: {period_s:.3g} s" for segments, period_s in periods.items())
    return Segments(num_segments=best, reason=f"simulated iterations by segments: {times}")
