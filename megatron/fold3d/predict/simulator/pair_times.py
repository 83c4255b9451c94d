"""The seconds of a pair of micro-batches: one computes during the other's collective.

This is Merak's pipeline (Sec. 5.3), for tensor-parallel collectives and all-to-alls of experts. A
micro-batch with n collectives alternates between n parts of computation and n collectives. So a
pair takes twice the longer of computation and collectives. At the beginning and at the end, half of
a part or of a collective overlaps nothing.
"""

from dataclasses import replace

from megatron.fold3d.plan.ir import Op
from megatron.fold3d.predict.simulator.costs import Costs


def pair_s(compute_s: float, sync_s: float, collectives: int = 0) -> float:
    """Return the seconds of two micro-batches together.

    Args:
        compute_s: computation of one micro-batch, without its collectives.
        sync_s: collectives of one micro-batch.
        collectives: the number of one's collectives; zero ignores the ends of the pair.
    """
    ends_s = min(compute_s, sync_s) / collectives if collectives else 0.0
    return 2 * max(compute_s, sync_s) + ends_s


def in_turns_s(
    costs: Costs, stage: int, op: Op, *, early: bool = False, ends: bool = True
) -> tuple[float, float]:
    """Return a pair's seconds until its second micro-batch begins, and from then to the end.

    Args:
        early: whether a separate action recomputes ahead of the backward.
        ends: whether the pair is the last of its chain, so that nothing hides its ends.
    """
    recompute_s = costs.recompute_s[stage] if costs.recompute_s else 0.0
    whole_s = {
        Op.FORWARD: costs.forward_s[stage],
        Op.RECOMPUTE: recompute_s,
        Op.BACKWARD: costs.backward_s[stage] - (recompute_s if early else 0.0),
    }[op]
    passes = costs.passes(stage, op, early=early)
    hidden_s = sum(sync_s[stage] for sync_s in (costs.tp_sync_s, costs.ep_sync_s) if sync_s)
    sync_s = min(whole_s, passes * hidden_s)
    number = passes * (costs.collectives[stage] if costs.collectives else 0)
    compute_s = whole_s - sync_s
    both_s = min(2 * whole_s, pair_s(compute_s, sync_s, number if ends else 0))
    first_s = max(compute_s, sync_s) / number if number and sync_s else 0.0
    return first_s, both_s - first_s


def without_exchanges(costs: Costs) -> Costs:
    """Return lower bounds on the costs: computation hides all of the experts' all-to-alls."""
    forward_s, backward_s = (
        tuple(whole_s - sent_s for whole_s, sent_s in zip(each_s, costs.ep_sync_s, strict=True))
        for each_s in (costs.forward_s, costs.backward_s)
    )
    return replace(costs, forward_s=forward_s, backward_s=backward_s)


def in_pairs(costs: Costs, *, early: bool) -> Costs:
    """Return lower bounds on the costs of a micro-batch, in a pair or alone."""
    stages = range(len(costs.forward_s))
    forward_s, backward_s, recompute_s = (
        tuple(sum(in_turns_s(costs, stage, op, early=early, ends=False)) / 2 for stage in stages)
        for op in (Op.FORWARD, Op.BACKWARD, Op.RECOMPUTE)
    )
    if early:
        backward_s = tuple(map(sum, zip(backward_s, recompute_s, strict=True)))
    return replace(costs, forward_s=forward_s, backward_s=backward_s, recompute_s=recompute_s)
