"""The time of a pair: Merak's pipeline of computation and tensor-parallel collectives (Sec. 5.3).

A micro-batch with n collectives alternates between n parts of computation and n collectives. One
micro-batch computes a part while the other's collective runs, so the pair takes twice the longer of
computation and collectives. At the beginning and at the end, half of a part or of a collective
overlaps nothing.
"""

from dataclasses import replace

from megatron.fold3d.plan.ir import Op
from megatron.fold3d.predict.simulator.costs import Costs


def pair_s(compute_s: float, sync_s: float, collectives: int = 0) -> float:
    """Return the seconds of two micro-batches together.

    Args:
        compute_s: computation of one of them, without its collectives.
        sync_s: its collectives.
        collectives: the number of them; zero ignores the ends of the pair.
    """
    ends_s = min(compute_s, sync_s) / collectives if collectives else 0.0
    return 2 * max(compute_s, sync_s) + ends_s


def paired_s(costs: Costs, stage: int, op: Op, *, early: bool = False) -> float:
    """Return the seconds of a stage's computation in a pair: half of the pair's time.

    Args:
        costs: the costs of the stages.
        stage: the stage of the computation.
        op: `FORWARD`, `BACKWARD` or `RECOMPUTE`.
        early: whether a separate action recomputes ahead of the backward.
    """
    recompute_s = costs.recompute_s[stage] if costs.recompute_s else 0.0
    whole_s = {
        Op.FORWARD: costs.forward_s[stage],
        Op.RECOMPUTE: recompute_s,
        Op.BACKWARD: costs.backward_s[stage] - (recompute_s if early else 0.0),
    }[op]
    if not costs.tp_sync_s:
        return whole_s
    recomputes = op is Op.BACKWARD and recompute_s > 0 and not early
    passes = 2 if recomputes else 1
    sync_s = min(whole_s, passes * costs.tp_sync_s[stage])
    collectives = passes * (costs.tp_collectives[stage] if costs.tp_collectives else 0)
    return min(whole_s, pair_s(whole_s - sync_s, sync_s, collectives) / 2)


def in_pairs(costs: Costs, *, early: bool) -> Costs:
    """Return lower bounds of the costs of micro-batches, in a pair or alone.

    Args:
        costs: the costs of the stages.
        early: as in `paired_s`, for all stages.
    """
    stages = range(len(costs.forward_s))
    forward_s, backward_s, recompute_s = (
        tuple(paired_s(costs, stage, op, early=early) for stage in stages)
        for op in (Op.FORWARD, Op.BACKWARD, Op.RECOMPUTE)
    )
    if early:
        backward_s = tuple(map(sum, zip(backward_s, recompute_s, strict=True)))
    return replace(costs, forward_s=forward_s, backward_s=backward_s, recompute_s=recompute_s)
