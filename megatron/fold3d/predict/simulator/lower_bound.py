"""A lower bound of the iteration over all orders of computation, from compute and links.

The bound ignores DP.sync, whose cost depends on how far it reaches into the next iteration.
"""

from collections.abc import Sequence

from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.predict.simulator.costs import Costs


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
