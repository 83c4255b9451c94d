"""A lower bound of the iteration over all orders of computation, from compute and links.

`lower_bound_s` ignores DP.sync. `lower_bound_with_sync_s` includes it: its cost depends on how far
it may reach into the next iteration, which a step that waits for the norm limits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.passes.early_grad_sync import early_stages
from megatron.fold3d.predict.simulator.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Seconds that no iteration of a plan's sizes is shorter than."""

    order_s: float
    """Whatever the order of computation, without DP.sync: `lower_bound_s`."""
    sync_s: float | None
    """With DP.sync, if no step waits for the gradients' norm; None if there is no DP.sync."""
    norm_s: float | None
    """With DP.sync, if every step waits for the norm, as one that clips does."""


def bounds_of(plan: Plan, costs: Costs, nic_of_rank: Sequence[int] | None = None) -> Bounds:
    """Return all lower bounds; arguments as of `lower_bound_s`."""
    order_s = lower_bound_s(plan, costs, nic_of_rank)
    if not any(costs.grad_sync_s):
        return Bounds(order_s=order_s, sync_s=None, norm_s=None)
    sync_s, norm_s = (
        max(order_s, lower_bound_with_sync_s(plan, costs, nic_of_rank, waits_for_norm=waits))
        for waits in (False, True)
    )
    return Bounds(order_s=order_s, sync_s=sync_s, norm_s=norm_s)


def lower_bound_s(
    plan: Plan, costs: Costs, nic_of_rank: Sequence[int] | None = None, *, splits: bool = True
) -> float:
    """Return a lower bound of iterations with these stages and micro-batches, in seconds.

    By computation: the first micro-batch reaches a rank through the stages before it; then the rank
    computes all of its work; then its last input gradient returns through the same stages, during
    which the rank may compute weight gradients. By links: a NIC sends the results of all
    micro-batches, in both directions; before the first and after the last of these sends, other
    ranks have work to do as well.

    Args:
        plan: a plan of the same sizes; its order does not matter.
        costs: the costs of its stages.
        nic_of_rank: as in `Execution`.
        splits: whether to include orders with weight gradients split from their backwards.
    """
    ranks, stages = plan.num_ranks, range(plan.num_stages)
    microbatches = plan.num_microbatches
    nics = tuple(nic_of_rank or range(ranks))
    weight_s = costs.weight_s if splits and costs.weight_s else (0.0,) * plan.num_stages
    back_s = [costs.backward_s[stage] - weight_s[stage] for stage in stages]

    def hop_s(rank: int) -> float:
        """From a rank to the next."""
        local = nics[rank % ranks] == nics[(rank + 1) % ranks]
        return costs.p2p_latency_s + (costs.p2p_local_s if local else costs.p2p_s)

    bound_s = 0.0
    way_in_s, way_out_s = [], []
    for rank in range(ranks):
        hops_s = sum(map(hop_s, range(rank)))
        way_in_s.append(sum(costs.forward_s[:rank]) + hops_s)
        way_out_s.append(sum(back_s[:rank]) + hops_s)
        own = stages[rank::ranks]
        others_wait_s = microbatches * sum(costs.forward_s[s] + back_s[s] for s in own)
        left_s = microbatches * sum(weight_s[s] for s in own)
        bound_s = max(bound_s, way_in_s[rank] + others_wait_s + max(left_s, way_out_s[rank]))

    for nic in set(nics):
        num_sent = sum(
            (nics[s % ranks] == nic) + (nics[(s + 1) % ranks] == nic)
            for s in stages[:-1]
            if nics[s % ranks] != nics[(s + 1) % ranks]
        )
        here = [rank for rank in range(ranks) if nics[rank] == nic]
        first_s = min(way_in_s[rank] + costs.forward_s[rank] for rank in here)
        # The last one to leave is read by the rank before, or by one that is further from the end.
        last_s = min(way_out_s[max(0, rank - 1)] + back_s[max(0, rank - 1)] for rank in here)
        if num_sent:
            link_s = microbatches * num_sent * costs.p2p_s + costs.p2p_latency_s
            bound_s = max(bound_s, first_s + link_s + last_s)
    return bound_s


def lower_bound_with_sync_s(
    plan: Plan, costs: Costs, nic_of_rank: Sequence[int] | None = None, *, waits_for_norm: bool
) -> float:
    """Return seconds that no iteration of many is shorter than, DP.sync included.

    A rank's first gradient is complete when all of its forwards have run, and all backwards of that
    model chunk. Only then does DP.sync begin. DP.sync may reach into the next iteration until the
    model chunk whose forwards begin last needs its parameters. In between, the link carries no
    DP.sync for the forwards of one model chunk and the backwards of one. The messages of other
    chunks share the link with DP.sync, or their computations prolong that time as well.

    If the step waits for the gradients' norm, all reductions have ended before it, and all gathers
    follow it. So the reductions overlap nothing but backwards, and the gathers nothing but forwards
    and the backwards behind them. A rank computes nothing until the parameters of its first chunk
    are gathered. What it has not computed when the last backward of that chunk begins are weight
    gradients, which alone overlap the chunk's reduction, and are reduced themselves.

    If the plan starts DP.sync between weight gradients, so may any order that the bound is for: no
    weight gradient of a chunk then has to be computed before some of its gradients are complete.

    One micro-batch of a chunk counts as nothing, since gradients are reduced in buckets, and may be
    complete before their chunk is. Parameters are gathered chunk by chunk, but for the first chunk
    of the first rank, which Megatron cuts into buckets.

    Args:
        plan: whose sizes count, not its order.
        costs: of its stages. Which segments have a replicated optimizer is in them.
        nic_of_rank: as in `Execution`.
        waits_for_norm: whether the step does, as one that clips.
    """
    ranks, microbatches = plan.num_ranks, plan.num_microbatches
    none = (0.0,) * plan.num_stages
    reduce_s, gather_s = (costs.grad_sync_s or none), (costs.param_gather_s or none)
    early_s = costs.weight_s or none if any(map(early_stages, plan.programs)) else none
    bound_s = way_in_s = 0.0
    for rank in range(ranks):
        own = range(rank, plan.num_stages, ranks)
        forwards_s = microbatches * sum(costs.forward_s[s] for s in own)
        backwards_s = microbatches * sum(costs.backward_s[s] for s in own)
        chunk_forwards_s = (microbatches - 1) * min(costs.forward_s[s] for s in own)
        chunk_backwards_s = (microbatches - 1) * min(costs.backward_s[s] - early_s[s] for s in own)
        reductions_s, gathers_s = (sum(part[s] for s in own) for part in (reduce_s, gather_s))
        sends_f_s, sends_b_s = _sends_beside_sync_s(plan, costs, nic_of_rank, rank)
        alone_s = chunk_forwards_s + chunk_backwards_s
        bound_s = max(bound_s, alone_s + reductions_s + gathers_s + sends_f_s + sends_b_s)
        if waits_for_norm:
            bound_s = max(
                bound_s,
                way_in_s + forwards_s + chunk_backwards_s + reductions_s + sends_b_s,
                gathers_s + sends_f_s + chunk_forwards_s + backwards_s,
                max(way_in_s, gather_s[rank] if rank else 0.0)
                + forwards_s
                + backwards_s
                + max(0.0, _exposed_s(plan, costs, rank) - microbatches * early_s[rank]),
            )
        way_in_s += costs.forward_s[rank]
    return bound_s


def _exposed_s(plan: Plan, costs: Costs, rank: int) -> float:
    """Return what no computation overlaps of the reduction of a rank's first chunk.

    Weight gradients of other chunks may follow that chunk's last backward. If to reduce them takes
    longer than to compute them, they overlap as much as they add.
    """
    reduce_s, weight_s = costs.grad_sync_s, costs.weight_s or (0.0,) * plan.num_stages
    others_s = {
        s: plan.num_microbatches * weight_s[s]
        for s in range(rank + plan.num_ranks, plan.num_stages, plan.num_ranks)
        if weight_s[s]
    }
    hides = max((1 - reduce_s[s] / computed_s for s, computed_s in others_s.items()), default=0.0)
    exposed_s = reduce_s[rank] - costs.backward_s[rank]
    return max(0.0, exposed_s - max(0.0, hides) * sum(others_s.values()))


def _sends_beside_sync_s(
    plan: Plan, costs: Costs, nic_of_rank: Sequence[int] | None, rank: int
) -> tuple[float, float]:
    """Return what a rank's sends, forward and backward, add to the time that its DP.sync takes.

    A send of the chunk that begins last, or of the one before it, may leave while there is no
    DP.sync, and so may the gradients of the chunk that is complete first. Any other send leaves
    beside DP.sync, or another computation of the rank, the one that reads its answer or the one
    that makes it, takes place where there is no DP.sync. It costs the shorter of the two times.
    """
    ranks, stages = plan.num_ranks, plan.num_stages
    shared = nic_of_rank is not None and len(set(nic_of_rank)) < ranks
    if ranks == 1 or shared or costs.grad_sync_local:
        return 0.0, 0.0
    own = range(rank, stages, ranks)
    weight_s = costs.weight_s or (0.0,) * stages
    forward_s = min(costs.forward_s[s] for s in own)
    backward_s = min(costs.backward_s[s] - weight_s[s] for s in own)
    chunks_f = max(0, sum(s + 1 < stages for s in own) - 2)
    chunks_b = max(0, sum(s > 0 for s in own) - 1)
    return (
        plan.num_microbatches * chunks_f * min(costs.p2p_s, forward_s),
        plan.num_microbatches * chunks_b * min(costs.p2p_s, backward_s),
    )
