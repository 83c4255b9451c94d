"""Bounds on a candidate's time and memory that need no simulation."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.launches import launches
from megatron.fold3d.predict.search.candidate_timeline import launches_in_backward
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.simulator.costs import Costs


@dataclass(frozen=True, slots=True)
class Bounded:
    """A candidate with its estimate and its bounds."""

    candidate: Candidate
    estimate: Estimate
    bound_s: float
    """No simulated iteration of the candidate is shorter."""
    device_bytes: float
    """Bytes on the fullest GPU; slow copies to the host can need more."""
    host_bytes: float
    """A lower bound on the bytes that one GPU's activations take on the host."""


def bounded(candidate: Candidate, estimate: Estimate) -> Bounded:
    """Return a candidate with its bounds."""
    return Bounded(
        candidate,
        estimate,
        _bound_s(candidate, estimate),
        _device_bytes(candidate, estimate),
        _most_copied(candidate, estimate.footprint.saved_bytes) if candidate.offload else 0.0,
    )


def _bound_s(candidate: Candidate, estimate: Estimate) -> float:
    """Bound the iteration from below by what each rank must do.

    The first micro-batch comes to a rank through those before it and the last one goes back through
    them, the rank computes all of its work in between, and the first segment's DP.sync follows; it
    may do so beside weight gradients that are delayed.
    DP.sync that ends with the iteration can begin after the last segment's last backward only, or
    with that backward where it is launched inside.
    """
    costs = estimate.costs
    inside_s = earlier_s(candidate, estimate)
    bound_s = 0.0
    for rank in range(candidate.num_ranks):
        forward_s, backward_s = _there_and_back(candidate, estimate, rank)
        compute_s = _work_s(candidate, estimate, rank)
        sync_s, gather_s = costs.grad_sync_s, costs.param_gather_s
        start_s = max(forward_s, gather_s[rank])
        synced_first_s = compute_s - _delayed_s(candidate, costs, rank) + backward_s + sync_s[0]
        synced_first_s -= inside_s
        bound_s = max(bound_s, start_s + max(compute_s, synced_first_s))
        synced_s = sum(sync_s[rank :: candidate.num_ranks])
        if candidate.backward_share is not None:
            bound_s = max(bound_s, synced_s)
        else:
            step_s = sum(costs.optimizer_s[rank :: candidate.num_ranks])
            late_s = start_s + compute_s - _hiding_s(candidate, costs, rank) + synced_s
            own_s = start_s + compute_s + max(0.0, sync_s[rank] - inside_s)
            bound_s = max(bound_s, own_s + step_s, late_s - inside_s + step_s)
        bound_s = max(bound_s, compute_s + _held_up_s(candidate, estimate, rank))
    copies_s = _most_copied(candidate, costs.offload_s) if candidate.offload else 0.0
    return max(bound_s, _messages_s(candidate, estimate), copies_s)


def earlier_s(candidate: Candidate, estimate: Estimate) -> float:
    """How many seconds before the end of its last backward a stage's DP.sync may begin."""
    if not launches_in_backward(candidate, estimate):
        return 0.0
    return max(estimate.costs.backward_s)


def _held_up_s(candidate: Candidate, estimate: Estimate, rank: int) -> float:
    """The time for which DP.sync's collectives, with one hardware queue, block a rank's compute.

    Of collectives launched in a row, all but the last must be over before anything else begins.
    Those launched inside a backward may overlap that backward.
    """
    if estimate.cuda_connections != 1 or candidate.is_stock:
        return 0.0
    costs, deferred = estimate.costs, candidate.backward_share is not None
    counts = launches(estimate.gradient_bytes, candidate.setup, deferred=deferred)
    held_up_s = 0.0
    for stage in range(rank, len(counts), candidate.num_ranks):
        sync_s, count = costs.grad_sync_s[stage], counts[stage]
        if deferred:  # two rows
            sync_s -= costs.kept_back_s[stage] if costs.kept_back_s else 0.0
            held_up_s += sync_s * max(0, count - 2) / count
        else:
            held_up_s += max(0.0, sync_s - costs.backward_s[stage]) * (count - 1) / count
    return held_up_s


def _there_and_back(candidate: Candidate, estimate: Estimate, rank: int) -> tuple[float, float]:
    """The first segment's forwards, and its backwards, on the ranks before this one."""
    costs = estimate.costs
    hops_s = rank * min(_message_s(estimate), costs.p2p_s, costs.p2p_local_s)
    return sum(costs.forward_s[:rank]) + hops_s, sum(costs.backward_s[:rank]) + hops_s


def _work_s(candidate: Candidate, estimate: Estimate, rank: int) -> float:
    """A rank's computation, and in stock the waits for its messages."""
    costs, stages = estimate.costs, range(rank, len(estimate.costs.forward_s), candidate.num_ranks)
    work_s = sum(costs.forward_s[stage] + costs.backward_s[stage] for stage in stages)
    if candidate.is_stock and not costs.sends_are_buffered and candidate.num_ranks > 1:
        message_s = min(_message_s(estimate), costs.p2p_local_s + costs.p2p_latency_s)
        sent = sum(stage + 1 < len(costs.forward_s) for stage in stages)
        if candidate.schedule == "1f1b":
            sent += sum(stage > 0 for stage in stages)
        work_s += sent * message_s
    return work_s * candidate.num_microbatches


def _delayed_s(candidate: Candidate, costs: Costs, rank: int) -> float:
    """What a rank computes after all of its backwards."""
    stages = (segment * candidate.num_ranks + rank for segment in candidate.delayed_weight_grads)
    return candidate.num_microbatches * sum(costs.weight_s[stage] for stage in stages)


def _message_s(estimate: Estimate) -> float:
    costs, several = estimate.costs, len(set(estimate.nic_of_rank)) > 1
    return costs.p2p_latency_s + (costs.p2p_s if several else costs.p2p_local_s)


def _messages_s(candidate: Candidate, estimate: Estimate) -> float:
    """Seconds of sends on the busiest NIC: forwards' results onward, backwards' results back."""
    nics, sent = estimate.nic_of_rank, [0] * (1 + max(estimate.nic_of_rank))
    for stage in range(1, len(estimate.costs.forward_s)):
        source, target = (nics[s % candidate.num_ranks] for s in (stage - 1, stage))
        if source != target:
            sent[source] += 1
            sent[target] += 1
    return max(sent) * candidate.num_microbatches * estimate.costs.p2p_s


def _hiding_s(candidate: Candidate, costs: Costs, rank: int) -> float:
    """What a rank computes after the last segment's last backward: the backwards of one group."""
    *others, _ = costs.backward_s[rank :: candidate.num_ranks]
    return _together(candidate) * sum(others)


def _together(candidate: Candidate) -> int:
    """How many micro-batches pass a segment before the next one's turn."""
    if candidate.schedule != "interleaved":
        return candidate.num_microbatches
    return min(candidate.num_microbatches, candidate.group_size or candidate.num_ranks)


def _most_copied(candidate: Candidate, of_stage: Sequence[float]) -> float:
    """A lower bound on what the busiest rank copies to the host, in the unit of ``of_stage``.

    The last segment, and the last two micro-batches of the others, need not be offloaded.
    """
    ranks, segments = candidate.num_ranks, candidate.num_segments
    copied = of_stage[: ranks * (segments - 1)]
    each = max((sum(copied[rank::ranks]) for rank in range(ranks)), default=0.0)
    return each * max(0, candidate.num_microbatches - 2)


def _device_bytes(candidate: Candidate, estimate: Estimate) -> float:
    """The fullest rank's memory, from its number of activations."""
    footprint, ranks = estimate.footprint, candidate.num_ranks
    return max(
        static
        + candidate.most_activations(rank) * max(footprint.saved_bytes[rank::ranks])
        + max(footprint.working_bytes[rank::ranks])
        for rank, static in enumerate(footprint.static_bytes)
    )
