"""Bounds on a candidate's time and memory that need no simulation.

`rank_times` bounds the layouts of layers that `policy.partition` compares. Bounds that hold for any
order of computation are in `simulator.lower_bound`.
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
    """A lower bound on the seconds of a simulated iteration."""
    device_bytes: float
    """An upper bound on the bytes of the fullest GPU; slow copies to the host can need more."""
    host_bytes: float
    """A lower bound on the bytes of one GPU's activations in host memory."""


def bounded(candidate: Candidate, estimate: Estimate, limit_bytes: float) -> Bounded:
    """Return a candidate with its bounds; memory is exact only if its bound exceeds the limit."""
    most = max(_rank_bytes(candidate, estimate, rank) for rank in range(candidate.num_ranks))
    if most > limit_bytes and has_exact_bytes(candidate):
        most = exact_bytes(candidate, estimate, above=limit_bytes)
    if candidate.recompute_layers:  # the numbers were chosen to fit, and differ between stages
        most = min(most, limit_bytes)
    return Bounded(
        candidate,
        estimate,
        least_iteration_s(candidate, estimate),
        most,
        _most_copied(candidate, estimate.footprint.saved_bytes) if candidate.offload else 0.0,
    )


def least_iteration_s(candidate: Candidate, estimate: Estimate) -> float:
    """Return a lower bound on the iteration from the work of each rank, in any order.

    The first segment's DP.sync follows all backwards; only delayed weight gradients may overlap it.
    DP.sync that ends with the iteration begins after the last segment's last backward, or during
    that backward if DDP's hooks launch it.
    """
    choice, ranks = candidate.choice, candidate.num_ranks
    early = bool(choice.where(recompute="early"))
    costs = estimate.costs
    if choice.pairs:
        costs = in_pairs(costs, early=early)
    elif candidate.combined:
        costs = without_exchanges(costs)
    if not choice.splits:  # backwards compute the weight gradients
        costs = replace(costs, weight_s=())
    microbatches, nics = candidate.num_microbatches, estimate.nic_of_rank
    inside_s = head_start_s(candidate, estimate)
    bound_s = order_s(costs, microbatches, nics, early=early) + first_sync_s(candidate, estimate)
    sync_s = [sum(costs.grad_sync_s[rank::ranks]) for rank in range(ranks)]
    if choice.carries:
        bound_s = max(bound_s, *sync_s)
    else:
        compute_s = [*map(sum, zip(costs.forward_s, costs.input_s, strict=True))]
        for rank in range(ranks):
            # After the last segment's last backward, one group's other backwards follow.
            *others_s, _ = costs.backward_s[rank::ranks]
            late_s = microbatches * sum(compute_s[rank::ranks]) - candidate.group * sum(others_s)
            before_s = sum(costs.forward_s[:rank])
            bound_s = max(bound_s, before_s + late_s + sync_s[rank] - inside_s)
        bound_s += min(sum(costs.optimizer_s[rank::ranks]) for rank in range(ranks))
    copies_s = _most_copied(candidate, costs.offload_s) if candidate.offload else 0.0
    return max(bound_s, copies_s)


def first_sync_s(candidate: Candidate, estimate: Estimate) -> float:
    """Return a lower bound on the seconds of the first segment's DP.sync after all computation.

    The bound is zero with delayed weight gradients, which could hide this DP.sync.
    """
    if candidate.choice.splits:
        return 0.0
    return max(0.0, estimate.costs.grad_sync_s[0] - head_start_s(candidate, estimate))


def head_start_s(candidate: Candidate, estimate: Estimate) -> float:
    """Return how many seconds before a stage's last backward ends its DP.sync may begin."""
    if not launches_in_backward(candidate, estimate):
        return 0.0
    return max(estimate.costs.backward_s)


def _most_copied(candidate: Candidate, of_stage: Sequence[float]) -> float:
    """Return a lower bound on the busiest rank's copies to the host, in the unit of ``of_stage``.

    The last segment, and the last two micro-batches of the others, need not be offloaded.
    """
    ranks, segments = candidate.num_ranks, candidate.num_segments
    copied = of_stage[: ranks * (segments - 1)]
    each = max((sum(copied[rank::ranks]) for rank in range(ranks)), default=0.0)
    return each * max(0, candidate.num_microbatches - 2)


def _rank_bytes(candidate: Candidate, estimate: Estimate, rank: int) -> float:
    """Return an upper bound on a rank's bytes, from its largest number of activations."""
    footprint, ranks = estimate.footprint, candidate.num_ranks
    held = _resident_bytes(candidate, estimate, rank)
    held += candidate.most_activations(rank) * max(footprint.saved_bytes[rank::ranks])
    return max(footprint.static_bytes[rank], held + max(footprint.working_bytes[rank::ranks]))


def _resident_bytes(candidate: Candidate, estimate: Estimate, rank: int) -> float:
    """Return a rank's bytes of parameters, gradients and optimizer while it holds activations."""
    gradients = estimate.gradient_bytes[rank :: candidate.num_ranks]
    change = aiao_change(gradients, candidate.setup, candidate.shards)
    return estimate.footprint.static_bytes[rank] + change


def has_exact_bytes(candidate: Candidate) -> bool:
    """Return True if `exact_bytes` applies: with several segments, and without offload."""
    return candidate.num_segments > 1 and not candidate.offload


def exact_bytes(candidate: Candidate, estimate: Estimate, above: float = 0.0) -> float:
    """Return the fullest rank's bytes, from the activations of each segment at each moment.

    Args:
        candidate: has no offload, so that its memory depends on its order alone.
        above: a rank whose upper bound is at most this many bytes counts with its upper bound.
    """
    footprint, ranks = estimate.footprint, candidate.num_ranks
    choice, microbatches = candidate.choice, candidate.num_microbatches
    each = 2 if choice.pairs else 1  # the order then has one micro-batch for each pair
    passes, group = -(-microbatches // each), choice.group and choice.group // each
    plain = Choice.plain(choice.schedule, candidate.num_segments, group=group, ahead=choice.ahead)
    bounds = sorted(((_rank_bytes(candidate, estimate, r), r) for r in range(ranks)), reverse=True)
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
    """Return lower bounds on each rank's seconds of computation, if all layers are alike.

    Args:
        num_microbatches: per iteration.
        may_keep_layers: whether the number of recomputed layers depends on the layout. If so, the
            bounds leave recomputation out.

    Returns:
        None if no layer can move to another stage.
    """
    source = max(range(len(start)), key=lambda stage: start[stage])
    target = (source + 1) % len(start)
    if len(start) == 1 or start[source] == 1:
        return None
    moved = list(start)
    moved[source] -= 1
    moved[target] += 1
    work_s, moved_s = (
        _microbatch_s(costs_of(layers), may_keep_layers) for layers in (start, tuple(moved))
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


def _microbatch_s(costs: Costs, may_keep_layers: bool) -> list[float]:
    """Return the seconds of one micro-batch's forward and backward in each stage."""
    again_s = costs.recompute_s if may_keep_layers else ()
    rows = zip(
        costs.forward_s, costs.backward_s, again_s or (0.0,) * len(costs.forward_s), strict=True
    )
    return [forward_s + backward_s - recompute_s for forward_s, backward_s, recompute_s in rows]
