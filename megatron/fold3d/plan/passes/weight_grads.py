"""The pass that splits backwards in two and delays their weight gradients.

Here the weight gradients of segment 0 are computed after all backwards of the rank:

    before  rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    after   rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 0W0 0W1
"""

from collections.abc import Sequence

from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError, Program


def delay_weight_grads(plan: Plan, segments: Sequence[int]) -> Plan:
    """Compute the weight gradients of some segments after all backwards of a rank.

    The next forward needs the first segment's gradients first, but its backward ends last. Only
    delayed weight gradients, for which no computation waits, can overlap its DP.sync. Zero Bubble
    (Qi et al., 2023) splits backwards in the same way.

    Args:
        plan: without DP.sync; other actions behind the last backward stay before the `WEIGHT`s.
        segments: those whose `BACKWARD` computes the input gradient alone; a `WEIGHT` follows.

    Raises:
        PlanError: a segment is not one of the plan's.
    """
    if unknown := [segment for segment in segments if not 0 <= segment < plan.num_segments]:
        raise PlanError(
            f"no segment {unknown[0]} whose weight gradients could be delayed; the plan has "
            f"segments 0 to {plan.num_segments - 1}"
        )
    delayed = [
        Action(segment * plan.num_ranks, Op.WEIGHT, microbatch)
        for segment in sorted(segments)
        for microbatch in range(plan.num_microbatches)
    ]
    return Plan(
        tuple(
            (*program, *(action._replace(stage=action.stage + rank) for action in delayed))
            for rank, program in enumerate(plan.programs)
        )
    )


def split_stages(program: Program) -> frozenset[int]:
    """Return the stages whose weight gradients are computed apart from their backwards."""
    return frozenset(stage for stage, op, _ in program if op is Op.WEIGHT)
