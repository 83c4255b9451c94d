"""The pass that keeps a stage's gradients whole only while they are computed and reduced.

With a distributed optimizer a replica steps with its shard of the reduced gradients. So when a
stage's reduce-scatter has ended, all other gradients of the stage can be freed. FREE_GRAD stands
one stage later, so that the reduce-scatter overlaps all backwards of the later stage:

    before  rank 0  0F0 2F0 4F0 4B0 4REDUCE_SCATTER 2B0 2REDUCE_SCATTER 0B0 0REDUCE_SCATTER ...
    after   rank 0  0F0 2F0 4F0 4B0 4REDUCE_SCATTER 2B0 2REDUCE_SCATTER
                    4FREE_GRAD 0B0 0REDUCE_SCATTER ...

Carried DP.sync needs whole gradients until it ends in the next iteration. The step follows at once,
so no shard has to be kept:

    before  rank 0  0STEP 0F0 2STEP 2F0 ...
    after   rank 0  0STEP 0FREE_GRAD 0F0 2STEP 2FREE_GRAD 2F0 ...
"""

from collections import defaultdict
from collections.abc import Iterator

from megatron.fold3d.plan.ir import Action, Op, Plan, Program, carried


def shard_grads(plan: Plan) -> Plan:
    """Free gradients that are reduced to shards, one stage after the stage's own backwards.

    In an order such as AIAO's, where a stage's backwards follow one another, a rank holds the whole
    gradients of at most two stages: one computes, and one is reduced. The gradients of the last two
    stages are not freed, because no other stage's backwards follow and the iteration ends.

    Gradients of a carried stage are freed after its step in the next iteration. The rank then holds
    no gradients when its forwards end, and all gradients when its backwards end.

    A plan that already frees gradients is returned unchanged.
    """
    if plan.has(Op.FREE_GRAD):
        return plan
    return plan.lowered(_sharded)


def _sharded(program: Program) -> Iterator[Action]:
    first: dict[int, int] = {}
    reduced: dict[int, int] = {}
    for index, (stage, op, _) in enumerate(program):
        if op is Op.BACKWARD:
            first.setdefault(stage, index)
        elif op is Op.REDUCE_SCATTER:
            reduced[stage] = index
    late = carried(program)
    freed: defaultdict[int, list[int]] = defaultdict(list)  # stages, by index of the next action
    for stage, start in reduced.items():
        later = sorted(index for index in first.values() if index > start)
        if len(later) > 1 and stage not in late:
            freed[later[1]].append(stage)

    for index, action in enumerate(program):
        yield from (Action(stage, Op.FREE_GRAD) for stage in freed.get(index, ()))
        yield action
        if action.op is Op.STEP and action.stage in late and action.stage in reduced:
            yield Action(action.stage, Op.FREE_GRAD)
