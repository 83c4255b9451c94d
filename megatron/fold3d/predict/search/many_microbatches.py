"""Extrapolation of an iteration with thousands of micro-batches from three with fewer.

Between its ramps a schedule repeats itself: each group of micro-batches adds the same amount to
each measure. So measures grow linearly with the number of groups. Extrapolation requires all of the
following; otherwise all micro-batches are simulated:

- Three iterations, a group apart, lie on one line in all measures.
- In the middle of each segment's forwards, and of its backwards, all ranks keep the same pace. If a
  rank fell behind the one before it, the slope would change once the lead is used up.
- The slope equals the bottleneck's own work on a group. A smaller slope would change once that work
  is no longer hidden, for example by DP.sync.
- Even the shortest of the three takes twice as long as a rank's DP.sync and all-gathers.
"""

from collections.abc import Callable
from dataclasses import replace
from math import ceil, lcm

from megatron.fold3d.observe.exposure import exposure, mean
from megatron.fold3d.observe.timeline import Lane, Timeline
from megatron.fold3d.plan.ir import Op
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.search.bounds import least_iteration_s
from megatron.fold3d.predict.search.candidates import Candidate

_LEAST_SAVED = 3  # the iteration has at least this many times the micro-batches of the three
_ALIKE = 1e-10  # relative error of sums of the same seconds in another order
_LEAST_S = 1e-12  # seconds of a group; avoids a division by zero without computation
_FAR = 1 << 20  # groups; with more of them, only the bottleneck's time grows


def measures(timeline: Timeline) -> tuple[float, ...]:
    """Return the measures of a timeline: the iteration's seconds, then its exposed seconds."""
    return timeline.period_s, *mean(exposure(timeline))


def extrapolated(
    candidate: Candidate,
    estimate: Estimate,
    simulated: Callable[[Candidate], Timeline],
    measures: Callable[[Timeline], tuple[float, ...]] = measures,
) -> tuple[float, ...] | None:
    """Return the extrapolated measures of a candidate, or None if extrapolation may be wrong.

    Args:
        estimate: the candidate's costs, which do not depend on the number of micro-batches.
        measures: returns the measures of a timeline, the iteration's seconds first.
    """
    if not can_extrapolate(candidate, estimate):
        return None
    numbers, group = _three_sizes(candidate, estimate), _group(candidate)
    group_s = _bottleneck_s(candidate, estimate, group)
    timelines = [simulated(with_microbatches(candidate, number)) for number in numbers]
    first, second, third = map(measures, timelines)
    near_s = _ALIKE * third[0]
    bends = any(
        abs(a + c - 2 * b) > max(near_s, _ALIKE * c)
        for a, b, c in zip(first, second, third, strict=True)
    )
    if bends or third[0] - second[0] < group_s - near_s:
        return None
    if not _keeps_pace(timelines[-1], (numbers[-1] - group) // 2, group, near_s):
        return None
    groups = (candidate.num_microbatches - numbers[-1]) / group
    return tuple(c + groups * (c - a) / 2 for a, c in zip(first, third, strict=True))


def iteration_s(
    candidate: Candidate, estimate: Estimate, simulated: Callable[[Candidate], Timeline]
) -> float:
    """Return the seconds of an iteration, extrapolated if possible: see `extrapolated`."""
    line = extrapolated(candidate, estimate, simulated)
    return simulated(candidate).period_s if line is None else line[0]


def can_extrapolate(candidate: Candidate, estimate: Estimate) -> bool:
    """Return True if extrapolation from three iterations may be exact and saves time.

    It is not exact if more micro-batches may reach a limit, so that measures do not grow linearly.
    Memory limits delayed weight gradients and late copies; a budget limits pauses of DP.sync.
    """
    few = candidate.num_microbatches < _LEAST_SAVED * sum(_three_sizes(candidate, estimate))
    costs = estimate.costs
    copies = zip(costs.offload_s + costs.reload_s, costs.forward_s + costs.backward_s, strict=True)
    copies_lag = candidate.offload and any(copy_s > compute_s for copy_s, compute_s in copies)
    return not (few or candidate.choice.fills_gaps or copies_lag or candidate.preemptive)


def with_microbatches(candidate: Candidate, number: int) -> Candidate:
    """Return the candidate with another number of micro-batches; a group of all stays so."""
    if candidate.choice.group == candidate.num_microbatches:
        candidate = candidate.with_options(group=number)
    return replace(candidate, num_microbatches=number)


def _group(candidate: Candidate) -> int:
    """Return the period of the schedule in micro-batches.

    The period is even, since ranks that share a link, and receives with one hardware queue,
    alternate between micro-batches, or between pairs.
    """
    period = 4 if candidate.choice.pairs else 2
    return lcm(period, candidate.group) if candidate.group < candidate.num_microbatches else period


def _three_sizes(candidate: Candidate, estimate: Estimate) -> tuple[int, int, int]:
    """Return three numbers of micro-batches, which outlast the ramps and twice a rank's DP.sync."""
    costs, ranks, group = estimate.costs, candidate.num_ranks, _group(candidate)
    ramps = 2 * group
    if candidate.group == candidate.num_microbatches:  # segments do not alternate
        ramps = 2 * ranks * (candidate.choice.ahead or 2)
    synced_s = max(
        sum(costs.grad_sync_s[rank::ranks]) + sum(costs.param_gather_s[rank::ranks])
        for rank in range(ranks)
    )
    hidden = 2 * synced_s / max(_bottleneck_s(candidate, estimate, group), _LEAST_S)
    groups = 1 + ceil(max(ramps / group, hidden))
    fewest = groups * group + candidate.num_microbatches % group
    return fewest, fewest + group, fewest + 2 * group


def _bottleneck_s(candidate: Candidate, estimate: Estimate, group: int) -> float:
    """Return the seconds that one more group adds to the lower bound on an iteration."""
    far, further = (with_microbatches(candidate, n * group) for n in (_FAR, 2 * _FAR))
    more_s = least_iteration_s(further, estimate) - least_iteration_s(far, estimate)
    return more_s / _FAR


def _keeps_pace(timeline: Timeline, microbatch: int, group: int, near_s: float) -> bool:
    """Return True if all ranks take equally long from a micro-batch to the one a group later."""
    last = max((span.iteration for spans in timeline.ranks for span in spans), default=0)
    paces: dict[tuple[int, Op], list[float]] = {}
    for spans in timeline.ranks:
        start_s = {
            span.action: span.start_s
            for span in spans
            if span.lane is Lane.COMPUTE and span.action and span.iteration == last
        }
        for action, begun_s in start_s.items():
            next_ = action._replace(microbatch=microbatch + group)
            if action.microbatch == microbatch and next_ in start_s:
                key = action.stage // timeline.num_ranks, action.op
                paces.setdefault(key, []).append(start_s[next_] - begun_s)
    return all(max(of_ranks) - min(of_ranks) <= near_s for of_ranks in paces.values())
