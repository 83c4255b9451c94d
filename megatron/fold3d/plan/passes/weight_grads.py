"""The pass that splits backwards in two and delays the weight gradients.

By default the weight gradients of segment 0 are computed after all backwards of the rank:

    before  rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    after   rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 0W0 0W1

With ``behind_own``, weight gradients of segment 1 are computed after the segment's own backwards:

    before  rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    after   rank 0  0F0 0F1 2F0 2F1 2B0 2B1 2W0 2W1 0B0 0B1
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError, Program, per_rank, stages_of
from megatron.fold3d.plan.ops import WEIGHT_OPS


def delay_weight_grads(plan: Plan, segments: Sequence[int], behind_own: Iterable[int] = ()) -> Plan:
    """Compute the weight gradients of some segments after all backwards of a rank.

    The first segment's backward ends last, although the next forward needs the segment first. Only
    delayed weight gradients, for which no computation waits, can overlap DP.sync of this segment.
    Zero Bubble (Qi et al., 2023) splits backwards in the same way.

    Args:
        plan: a plan without DP.sync; other actions after the last backward stay before `WEIGHT`.
        segments: segments whose `BACKWARD` computes the input gradient alone; a `WEIGHT` follows.
        behind_own: the subset whose weight gradients follow the segment's own backwards.

    Raises:
        PlanError: the plan does not have one of the segments.
    """
    if unknown := [segment for segment in segments if not 0 <= segment < plan.num_segments]:
        raise PlanError(
            f"no segment {unknown[0]} whose weight gradients could be delayed; the plan has "
            f"segments 0 to {plan.num_segments - 1}"
        )
    stages = frozenset(stages_of(segments, plan.num_ranks))
    own = stages & {*stages_of(behind_own, plan.num_ranks)}

    def delayed(program: Program) -> Iterator[Action]:
        backwards = [a for a in program if a.op is Op.BACKWARD and a.stage in stages]
        last = {action.stage: action for action in backwards}
        weights: defaultdict[int, list[Action]] = defaultdict(list)
        for action in sorted(backwards):
            weights[action.stage].append(action._replace(op=Op.WEIGHT))
        for action in program:
            yield action
            if action.stage in own and action == last.get(action.stage):
                yield from weights.pop(action.stage)
        yield from chain.from_iterable(weights.values())

    return plan.lowered(delayed)


def split_stages(program: Program) -> frozenset[int]:
    """Return the stages whose weight gradients are separate actions."""
    return frozenset(stage for stage, op, _ in program if op in WEIGHT_OPS)


@per_rank
def split_in_place(program: Program) -> Iterator[Action]:
    """Split each backward of a program, with its weight gradients right after it.

    The program takes as long as with whole backwards, and each half can be timed.
    """
    for action in program:
        yield action
        if action.op is Op.BACKWARD:
            yield action._replace(op=Op.WEIGHT)
