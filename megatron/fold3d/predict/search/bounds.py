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
    """Bound the iteration from below by what each rank must do.

    The first micro-batch reaches a rank through the ranks before it, and the last one returns
    through them. In between the rank computes all of its work. The first segment's DP.sync follows;
    it may overlap delayed weight gradients. DP.sync that ends with the iteration can begin only
    after the last segment's last backward, or during that backward if it is launched inside.
    """
    choice = candidate.choice
    if choice.pairs:
        early = bool(choice.where(recompute="early"))
        estimate = replace(estimate, costs=in_pairs(estimate.costs, early=early))
    elif candidate.combined:
        estimate = replace(estimate, costs=without_exchanges(estimate.costs))
    costs = estimate.costs
    inside_s = earlier_s(candidate, estimate)
    delayed = _delayed_segments(candidate)
    bound_s = 0.0
    for rank in range(candidate.num_ranks):
        forward_s, backward_s = _there_and_back(candidate, estimate, rank)
        compute_s = _work_s(candidate, estimate, rank)
        stages = (segment * candidate.num_ranks + rank for segment in delayed)
        left_s = candidate.num_microbatches * sum(costs.weight_s[stage] for stage in stages)
        sync_s, gather_s = costs.grad_sync_s, costs.param_gather_s
        start_s = max(forward_s, gather_s[rank])
        synced_first_s = compute_s - left_s + backward_s + sync_s[0]
        if choice.fills_gaps:  # those of the first segment, while its gradients go back
            synced_first_s -= min(backward_s, candidate.num_microbatches * costs.weight_s[rank])
        synced_first_s -= inside_s
        bound_s = max(bound_s, start_s + max(compute_s, synced_first_s))
        synced_s = sum(sync_s[rank :: candidate.num_ranks])
        if choice.carries:
            bound_s = max(bound_s, synced_s)
        else:
            step_s = sum(costs.optimizer_s[rank :: candidate.num_ranks])
            # One group's backwards follow the last segment's last one.
            *others_s, _ = costs.backward_s[rank :: candidate.num_ranks]
            late_s = start_s + compute_s - candidate.group * sum(others_s) + synced_s
            own_s = start_s + max(compute_s, compute_s - left_s + sync_s[rank] - inside_s)
            bound_s = max(bound_s, own_s + step_s, late_s - inside_s + step_s)
    copies_s = _most_copied(candidate, costs.offload_s) if candidate.offload else 0.0
    return max(bound_s, _messages_s(candidate, estimate), copies_s)


def earlier_s(candidate: Candidate, estimate: Estimate) -> float:
    """Return the seconds before the end of its last backward at which DP.sync may begin."""
    if not launches_in_backward(candidate, estimate):
        return 0.0
    return max(estimate.costs.backward_s)


def _there_and_back(candidate: Candidate, estimate: Estimate, rank: int) -> tuple[float, float]:
    """Return the seconds of the first segment's forwards, and backwards, on the ranks before."""
    costs = estimate.costs
    hops_s = rank * min(_message_s(estimate), costs.p2p_s, costs.p2p_local_s)
    backward_s = sum(costs.backward_s[:rank])
    if candidate.choice.fills_gaps:
        backward_s -= sum(costs.weight_s[:rank])
    if candidate.choice.where(recompute="early"):
        backward_s -= sum(costs.recompute_s[:rank])
    return sum(costs.forward_s[:rank]) + hops_s, backward_s + hops_s


def _work_s(candidate: Candidate, estimate: Estimate, rank: int) -> float:
    """Return a rank's computation and, for stock, its waits for messages, in seconds."""
    costs, stages = estimate.costs, range(rank, len(estimate.costs.forward_s), candidate.num_ranks)
    work_s = sum(costs.forward_s[stage] + costs.backward_s[stage] for stage in stages)
    if candidate.is_stock and not costs.sends_are_buffered and candidate.num_ranks > 1:
        message_s = min(_message_s(estimate), costs.p2p_local_s + costs.p2p_latency_s)
        sent = sum(stage + 1 < len(costs.forward_s) for stage in stages)
        if candidate.schedule == "1f1b":
            sent += sum(stage > 0 for stage in stages)
        work_s += sent * message_s
    return work_s * candidate.num_microbatches


def _delayed_segments(candidate: Candidate) -> Sequence[int]:
    """Return the segments whose weight gradients may follow all of a rank's backwards."""
    choice = candidate.choice
    if choice.fills_gaps:
        return range(1, candidate.num_segments)
    return *choice.where(wgrad="behind"), *choice.where(wgrad="last")


def _message_s(estimate: Estimate) -> float:
    costs, several = estimate.costs, len(set(estimate.nic_of_rank)) > 1
    return costs.p2p_latency_s + (costs.p2p_s if several else costs.p2p_local_s)


def _messages_s(candidate: Candidate, estimate: Estimate) -> float:
    """Return the seconds of sends on the busiest NIC, in both directions of the pipeline."""
    nics, sent = estimate.nic_of_rank, [0] * (1 + max(estimate.nic_of_rank))
    for stage in range(1, len(estimate.costs.forward_s)):
        source, target = (nics[s % candidate.num_ranks] for s in (stage - 1, stage))
        if source != target:
            sent[source] += 1
            sent[target] += 1
    return max(sent) * candidate.num_microbatches * estimate.costs.p2p_s


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
