"""What is known of a candidate without a simulation: its costs, its memory, a bound on its time."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fold3d.analysis.candidates import Candidate
from megatron.fold3d.analysis.costs import Costs
from megatron.fold3d.analysis.estimate import Estimate


@dataclass(frozen=True, slots=True)
class Bounded:
    """A candidate with what its costs say at once."""

    candidate: Candidate
    estimate: Estimate
    bound_s: float
    device_bytes: float
    host_bytes: float
    """Of one GPU's activations, the least that must fit there."""


def bounded(candidate: Candidate, known: Estimate) -> Bounded:
    """Return a candidate with its bounds."""
    return Bounded(
        candidate,
        known,
        _bound_s(candidate, known),
        _device_bytes(candidate, known),
        _most_copied(candidate, known.footprint.saved_bytes) if candidate.offload else 0.0,
    )


def _bound_s(candidate: Candidate, known: Estimate) -> float:
    """Bound the iteration from below by what each rank must do.

    The first micro-batch comes to a rank through those before it and the last one goes back through
    them, the rank computes all of its work in between, and the first segment's DP.sync follows.
    DP.sync that ends with the iteration can begin after the last segment's last backward only.
    """
    costs = known.costs
    bound_s = 0.0
    for rank in range(candidate.num_ranks):
        forward_s, backward_s = _there_and_back(candidate, known, rank)
        compute_s = _work_s(candidate, known, rank)
        sync_s, gather_s = costs.grad_sync_s, costs.param_gather_s
        start_s = max(forward_s, gather_s[rank])
        bound_s = max(bound_s, start_s + compute_s + backward_s + sync_s[0])
        synced_s = sum(sync_s[rank :: candidate.num_ranks])
        if candidate.backward_share is not None:
            bound_s = max(bound_s, synced_s)
        else:
            step_s = sum(costs.optimizer_s[rank :: candidate.num_ranks])
            late_s = start_s + compute_s - _hiding_s(candidate, costs, rank) + synced_s
            bound_s = max(bound_s, start_s + compute_s + sync_s[rank] + step_s, late_s + step_s)
    copies_s = _most_copied(candidate, costs.offload_s) if candidate.offload else 0.0
    return max(bound_s, _messages_s(candidate, known), copies_s)


def _there_and_back(candidate: Candidate, known: Estimate, rank: int) -> tuple[float, float]:
    """The first segment's forwards, and its backwards, on the ranks before this one."""
    costs = known.costs
    hops_s = rank * min(_message_s(known), costs.p2p_s, costs.p2p_local_s)
    return sum(costs.forward_s[:rank]) + hops_s, sum(costs.backward_s[:rank]) + hops_s


def _work_s(candidate: Candidate, known: Estimate, rank: int) -> float:
    """A rank's computation, and what stock waits for its messages."""
    costs, stages = known.costs, range(rank, len(known.costs.forward_s), candidate.num_ranks)
    work_s = sum(costs.forward_s[stage] + costs.backward_s[stage] for stage in stages)
    if candidate.is_stock and not costs.sends_are_buffered and candidate.num_ranks > 1:
        message_s = min(_message_s(known), costs.p2p_local_s + costs.p2p_latency_s)
        sent = sum(stage + 1 < len(costs.forward_s) for stage in stages)
        if candidate.schedule == "1f1b":
            sent += sum(stage > 0 for stage in stages)
        work_s += sent * message_s
    return work_s * candidate.num_microbatches


def _message_s(known: Estimate) -> float:
    costs, several = known.costs, len(set(known.nic_of_rank)) > 1
    return costs.p2p_latency_s + (costs.p2p_s if several else costs.p2p_local_s)


def _messages_s(candidate: Candidate, known: Estimate) -> float:
    """What the busiest NIC sends: a forward's result to the next stage, a backward's back."""
    nics, sent = known.nic_of_rank, [0] * (1 + max(known.nic_of_rank))
    for stage in range(1, len(known.costs.forward_s)):
        source, target = (nics[s % candidate.num_ranks] for s in (stage - 1, stage))
        if source != target:
            sent[source] += 1
            sent[target] += 1
    return max(sent) * candidate.num_microbatches * known.costs.p2p_s


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
    """Seconds or bytes of what a rank certainly copies: all but the last segment and few others."""
    ranks, segments = candidate.num_ranks, candidate.num_segments
    copied = of_stage[: ranks * (segments - 1)]
    each = max((sum(copied[rank::ranks]) for rank in range(ranks)), default=0.0)
    return each * max(0, candidate.num_microbatches - 2)


def _device_bytes(candidate: Candidate, known: Estimate) -> float:
    """The fullest rank's memory, from its number of activations."""
    footprint, ranks = known.footprint, candidate.num_ranks
    return max(
        static
        + candidate.most_activations(rank) * max(footprint.saved_bytes[rank::ranks])
        + max(footprint.working_bytes[rank::ranks])
        for rank, static in enumerate(footprint.static_bytes)
    )
