"""Bounds on a candidate's time and memory that need no simulation.

`rank_times` are those of layouts, with which `policy.partition` skips some. What no order of a plan
beats is in `simulator.lower_bound`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.memory import Moment, fullest
from megatron.fold3d.policy.partition import Layers, RankTimes
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.sharded_footprint import aiao_change
from megatron.fold3d.predict.search.candidate_timeline import launches_in_backward
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.lower_bound import order_s
from megatron.fold3d.predict.simulator.pair_times import in_pairs, without_exchanges


@dataclass(frozen=True, slots=True)
class Bounded:
    """A candidate with its estimate and its bounds."""

    candidate: Candidate
    estimate: Estimate
    bound_s: float
    """No simulated iteration of the candidate is shorter."""
    device_bytes: float
    """An upper bound on the bytes of the fullest GPU; slow copies to the host can need more."""
    host_bytes: float
    """A lower bound on the bytes that one GPU's activations take on the host."""


def bounded(candidate: Candidate, estimate: Estimate, limit_bytes: float) -> Bounded:
    """Return a candidate with its bounds; its memory is exact if only that shows that it fits."""
    most = max(_of_rank(candidate, estimate, rank) for rank in range(candidate.num_ranks))
    if most > limit_bytes and has_exact_bytes(candidate):
        most = exact_bytes(candidate, estimate, above=limit_bytes)
    if candidate.recompute_layers:  # stages differ; numbers were chosen to fit
        most = min(most, limit_bytes)
    return Bounded(
        candidate,
        estimate,
        least_iteration_s(candidate, estimate),
        most,
        _most_copied(candidate, estimate.footprint.saved_bytes) if candidate.offload else 0.0,
    )


def least_iteration_s(candidate: Candidate, estimate: Estimate) -> float:
    """Bound the iteration from below by what each rank must do, in any order.

    The first segment's DP.sync follows; it may overlap delayed weight gradients. DP.sync that ends
    with the iteration can begin only after the last segment's last backward, or during that
    backward if it is launched inside.
    """
    choice, ranks = candidate.choice, candidate.num_ranks
    early = bool(choice.where(recompute="early"))
    costs = estimate.costs
    if choice.pairs:
        costs = in_pairs(costs, early=early)
    elif candidate.combined:
        costs = without_exchanges(costs)
    if not choice.splits:  # the weight gradients are a part of backwards
        costs = replace(costs, weight_s=())
    microbatches, nics = candidate.num_microbatches, estimate.nic_of_rank
    inside_s = earlier_s(candidate, estimate)
    bound_s = order_s(costs, microbatches, nics, early=early) + first_sync_s(candidate, estimate)
    sync_s = [sum(costs.grad_sync_s[rank::ranks]) for rank in range(ranks)]
    if choice.carries:
        bound_s = max(bound_s, *sync_s)
    else:
        compute_s = [*map(sum, zip(costs.forward_s, costs.input_s, strict=True))]
        for rank in range(ranks):
            # One group's backwards follow the last segment's last one.
            *others_s, _ = costs.backward_s[rank::ranks]
            late_s = microbatches * sum(compute_s[rank::ranks]) - candidate.group * sum(others_s)
            before_s = sum(costs.forward_s[:rank])
            bound_s = max(bound_s, before_s + late_s + sync_s[rank] - inside_s)
        bound_s += min(sum(costs.optimizer_s[rank::ranks]) for rank in range(ranks))
    copies_s = _most_copied(candidate, costs.offload_s) if candidate.offload else 0.0
    return max(bound_s, copies_s)


def first_sync_s(candidate: Candidate, estimate: Estimate) -> float:
    """Return for how long the first segment's DP.sync lasts at least, behind all computation.

    Only delayed weight gradients could hide it.
    """
    if candidate.choice.splits:
        return 0.0
    return max(0.0, estimate.costs.grad_sync_s[0] - earlier_s(candidate, estimate))


def earlier_s(candidate: Candidate, estimate: Estimate) -> float:
    """Return the seconds before the end of its last backward at which DP.sync may begin."""
    if not launches_in_backward(candidate, estimate):
        return 0.0
    return max(estimate.costs.backward_s)


def _most_copied(candidate: Candidate, of_stage: Sequence[float]) -> float:
    """A lower bound on what the busiest rank copies to the host, in the unit of ``of_stage``.

    The last segment, and the last two micro-batches of the others, need not be offloaded.
    """
    ranks, segments = candidate.num_ranks, candidate.num_segments
    copied = of_stage[: ranks * (segments - 1)]
    each = max((sum(copied[rank::ranks]) for rank in range(ranks)), default=0.0)
    return each * max(0, candidate.num_microbatches - 2)


def _of_rank(candidate: Candidate, estimate: Estimate, rank: int) -> float:
    """An upper bound on a rank's memory, from its number of activations."""
    footprint, ranks = estimate.footprint, candidate.num_ranks
    held = _resident_bytes(candidate, estimate, rank)
    held += candidate.most_activations(rank) * max(footprint.saved_bytes[rank::ranks])
    return max(footprint.static_bytes[rank], held + max(footprint.working_bytes[rank::ranks]))


def _resident_bytes(candidate: Candidate, estimate: Estimate, rank: int) -> float:
    """Return what a rank holds of parameters, gradients and optimizer beside its activations."""
    gradients = estimate.gradient_bytes[rank :: candidate.num_ranks]
    change = aiao_change(gradients, candidate.setup, candidate.shards)
    return estimate.footprint.static_bytes[rank] + change


def has_exact_bytes(candidate: Candidate) -> bool:
    """Return True if the most that a GPU holds follows from the order, and is not bounded by it."""
    return candidate.num_segments > 1 and not candidate.offload


def exact_bytes(candidate: Candidate, estimate: Estimate, above: float = 0.0) -> float:
    """Return the fullest rank's memory, from what each segment holds at each moment.

    Args:
        candidate: one whose memory depends on its order alone: without offload.
        above: ranks whose upper bound is no more count with that.
    """
    footprint, ranks = estimate.footprint, candidate.num_ranks
    choice, microbatches = candidate.choice, candidate.num_microbatches
    each = 2 if choice.pairs else 1  # of pairs, the order is that in which each is one micro-batch
    passes, group = -(-microbatches // each), choice.group and choice.group // each
    plain = Choice.plain(choice.schedule, candidate.num_segments, group=group, ahead=choice.ahead)
    bounds = sorted(((_of_rank(candidate, estimate, r), r) for r in range(ranks)), reverse=True)
    most = 0.0
    for bound, rank in bounds:
        if bound <= max(most, above):
            return max(most, bound)
        saved, working = footprint.saved_bytes[rank::ranks], footprint.working_bytes[rank::ranks]
        held = max(
            working[segment]
            + sum(min(each * n, microbatches) * b for n, b in zip(counts, saved, strict=True))
            for segment, counts in _fullest(plain, ranks, passes, rank, candidate.combined)
        )
        most = max(
            most, footprint.static_bytes[rank], held + _resident_bytes(candidate, estimate, rank)
        )
    return most


@lru_cache(maxsize=8192)
def _fullest(
    choice: Choice, ranks: int, microbatches: int, rank: int, combined: bool
) -> tuple[Moment, ...]:
    job = Job(choice=choice, num_ranks=ranks, num_microbatches=microbatches, combined=combined)
    order = job.computed
    return fullest(order.programs[rank], ranks, len(choice.segments))


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
        _of_microbatch_s(costs_of(layers), may_keep_layers) for layers in (start, tuple(moved))
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


def _of_microbatch_s(costs: Costs, may_keep_layers: bool) -> list[float]:
    """Return the seconds of one micro-batch in each stage."""
    again_s = costs.recompute_s if may_keep_layers else ()
    rows = zip(
        costs.forward_s, costs.backward_s, again_s or (0.0,) * len(costs.forward_s), strict=True
    )
    return [forward_s + backward_s - recompute_s for forward_s, backward_s, recompute_s in rows]
