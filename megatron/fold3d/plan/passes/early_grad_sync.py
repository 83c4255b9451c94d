"""The pass that starts DP.sync of a stage while its delayed weight gradients are computed.

The DP.sync of the segment whose backward runs last is exposed. Its weight gradients need not be
computed micro-batch by micro-batch: parameter by parameter, the gradients of some parameters are
complete while others are still computed. So slices of DP.sync stand between the weight gradients:

    before  rank 0  0F0 0F1 0B0 0B1 0W0 0W1 0REDUCE_GRAD 0WAIT_GRAD
    after   rank 0  0F0 0F1 0B0 0B1 0W0 0REDUCE_GRAD.500 0W1 0REDUCE_GRAD 0WAIT_GRAD

In such a stage ``0W0`` and ``0W1`` are the first and the second half of the work for all
micro-batches, and ``0REDUCE_GRAD.500`` starts what is complete, about a half.
"""

from collections import Counter
from collections.abc import Container

from megatron.fold3d.plan.ir import WHOLE, Action, Op, Plan, Program
from megatron.fold3d.plan.passes.grad_sync import carried_over


def reduce_early(plan: Plan, stages: Container[int]) -> Plan:
    """Put a slice of DP.sync behind each weight gradient, where these follow all backwards.

    Args:
        plan: a plan with DP.sync.
        stages: those that may be changed.
    """
    return Plan(tuple(_with_slices(program, stages) for program in plan.programs))


def early_stages(program: Program) -> frozenset[int]:
    """Return the stages whose weight gradients are computed parameter by parameter.

    They are those in which a slice of DP.sync precedes a weight gradient of the same iteration.
    """
    late = carried_over(program)
    begun: set[int] = set()
    early: set[int] = set()
    for action in program:
        stage, op, _ = action
        if op is Op.REDUCE_SLICE and action not in late:
            begun.add(stage)
        elif op is Op.WEIGHT and stage in begun:
            early.add(stage)
    return frozenset(early)


def all_early(plan: Plan) -> bool:
    """Return True if slices of DP.sync stand between weight gradients only, if there are any."""
    return all(
        {action.stage for action in program if action.op is Op.REDUCE_SLICE}
        <= early_stages(program)
        for program in plan.programs
    )


def num_needed(end: int, num_weights: int) -> int:
    """Return how many of a stage's weight gradients come before a slice that ends at ``end``."""
    return -(-end * num_weights // WHOLE)


def _with_slices(program: Program, stages: Container[int]) -> Program:
    weights = Counter(stage for stage, op, _ in program if op is Op.WEIGHT)
    left = Counter(stage for stage, op, _ in program if op is Op.BACKWARD)
    done: Counter[int] = Counter()
    lowered: list[Action] = []
    for action in program:
        stage, op, _ = action
        lowered.append(action)
        left[stage] -= op is Op.BACKWARD
        if op is not Op.WEIGHT or stage not in stages:
            continue
        if left[stage]:  # not all backwards have run: the micro-batches stay apart
            weights[stage] = 0
        done[stage] += 1
        if 0 < done[stage] < weights[stage]:
            end = done[stage] * WHOLE // weights[stage]
            lowered.append(Action(stage, Op.REDUCE_SLICE, end))
    return tuple(lowered)
