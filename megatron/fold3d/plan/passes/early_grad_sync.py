"""The pass that starts DP.sync of a stage while its delayed weight gradients are computed.

DP.sync of the segment whose backward runs last is exposed. If this segment's weight gradients are
computed parameter by parameter instead of micro-batch by micro-batch, the gradients of some
parameters are complete while others are still computed. So parts of DP.sync stand between the
weight gradients:

    before  rank 0  0F0 0F1 0B0 0B1 0W0 0W1 0ALL_REDUCE 0STEP
    after   rank 0  0F0 0F1 0B0 0B1 0W:500 0ALL_REDUCE:500 0W:1000 0ALL_REDUCE 0STEP

``0W:500`` is the first half of the work for all micro-batches, and ``0ALL_REDUCE:500`` sums the
first half of the gradients, in the order in which they become complete.
"""

from collections import Counter
from collections.abc import Container, Iterator

from megatron.fold3d.plan.ir import WHOLE, Action, Op, Program, per_rank
from megatron.fold3d.plan.ops import SUM_OPS


@per_rank
def reduce_early(program: Program, stages: Container[int]) -> Iterator[Action]:
    """Cut weight gradients after a stage's last backward into parts, and reduce each part."""
    weights = Counter(stage for stage, op, _ in program if op is Op.WEIGHT and stage in stages)
    left = Counter(stage for stage, op, _ in program if op is Op.BACKWARD)
    apart = set()  # stages whose WEIGHT actions stay, since a backward follows one of these
    for stage, op, _ in program:
        left[stage] -= op is Op.BACKWARD
        if op is Op.WEIGHT and left[stage]:
            apart.add(stage)
    sums = {stage: op for stage, op, _ in program if op in SUM_OPS}
    begun: Counter[int] = Counter()
    done: Counter[int] = Counter()
    for action in program:
        stage = action.stage
        if action.op is not Op.WEIGHT or weights[stage] < 2 or stage in apart:
            yield action
            continue
        done[stage] += 1
        end = done[stage] * WHOLE // weights[stage]
        if end == begun[stage]:  # an empty part: more micro-batches than thousandths
            continue
        begun[stage] = end
        yield Action(stage, Op.WEIGHT_PART, end)
        if end < WHOLE:
            yield Action(stage, sums[stage], end)


def stages_in_parts(program: Program) -> frozenset[int]:
    """Return the stages whose weight gradients are computed parameter by parameter."""
    return frozenset(stage for stage, op, _ in program if op is Op.WEIGHT_PART)
