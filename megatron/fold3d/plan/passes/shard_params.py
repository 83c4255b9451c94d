"""The pass that keeps a stage's parameters whole only while the stage computes.

Each replica of a stage holds a shard of the stage's parameters. All micro-batches pass a stage
before the next stage, so two all-gathers per iteration are enough: for forwards and for backwards
(AxoNN's depth dimension, gathered once per segment instead of once per micro-batch).

    before  rank 0  0F0 2F0 4F0 4B0 2B0 0B0
    after   rank 0  0ALL_GATHER 2ALL_GATHER 0F0 0FREE_PARAM
                    4ALL_GATHER 2F0 4F0 4B0 4FREE_PARAM_B
                    0ALL_GATHER_B 2B0 2FREE_PARAM_B 0B0 0FREE_PARAM_B
"""

from collections.abc import Iterator
from itertools import pairwise

from megatron.fold3d.plan.ir import Action, Op, Plan, Program
from megatron.fold3d.plan.ops import FREE_OPS
from megatron.fold3d.plan.passes.param_gather import add_param_gather

_READS_IN_BACKWARD = frozenset({Op.BACKWARD, Op.RECOMPUTE})


def shard_params(plan: Plan) -> Plan:
    """Free each stage's parameters after their last use, and gather them one stage ahead.

    In an order such as AIAO's, where a stage's forwards follow one another, a rank holds the whole
    parameters of at most two stages: one computes, and the next is gathered. If no other stage is
    gathered between a stage's last forward and first backward, the stage's parameters stay whole,
    since freeing them would not lower the peak. Weight gradients (`WEIGHT`) read no parameters.

    A plan that already frees parameters is returned unchanged.
    """
    if plan.has(*FREE_OPS):
        return plan
    gathered = add_param_gather(plan)
    return gathered.lowered(_sharded) if plan.has(Op.BACKWARD) else gathered


def _sharded(program: Program) -> Iterator[Action]:
    last_forward = {a.stage: i for i, a in enumerate(program) if a.op is Op.FORWARD}
    uses = [(i, a.stage) for i, a in enumerate(program) if a.op in _READS_IN_BACKWARD]
    first_use = {stage: i for i, stage in reversed(uses)}
    last_use = {stage: i for i, stage in uses}
    gathers = [i for i, a in enumerate(program) if a.op is Op.ALL_GATHER]

    in_order = sorted(first_use, key=first_use.__getitem__)
    begins = {in_order[0]: first_use[in_order[0]]}  # by stage, where ALL_GATHER_B would stand
    begins |= {stage: first_use[before] for before, stage in pairwise(in_order)}
    freed = {
        stage
        for stage, end in last_forward.items()
        if any(end < i < first_use[stage] for i in gathers)
    }
    begins = {stage: max(begins[stage], last_forward[stage] + 1) for stage in freed}

    for index, action in enumerate(program):
        stage = action.stage
        yield from (
            Action(other, Op.ALL_GATHER_B) for other in in_order if begins.get(other) == index
        )
        yield action
        if stage in freed and last_forward[stage] == index:
            yield Action(stage, Op.FREE_PARAM)
        if last_use.get(stage) == index:
            yield Action(stage, Op.FREE_PARAM_B)
