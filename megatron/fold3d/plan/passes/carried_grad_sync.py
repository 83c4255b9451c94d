"""The passes that let DP.sync reach into the next iteration.

`carry_grad_sync` moves a stage's step before its first forward of the next iteration:

    before  rank 0  0F0 0F1 2F0 2F1 2B0 2B1 2ALL_REDUCE 0B0 0B1 0ALL_REDUCE 2STEP 0STEP
    after   rank 0  0STEP 0F0 0F1 2STEP 2F0 2F1 2B0 2B1 2REDUCE_KEPT 2ALL_REDUCE
                    0B0 0B1 0REDUCE_KEPT 0ALL_REDUCE 2FINALIZE 0FINALIZE

In a plan that gathers parameters, the step moves before the all-gather. `share_grad_sync` then
leaves a part of each sum, here a half, for the next iteration, in the order in which forwards need
the parameters. The rest of the first stage's sum starts when all backwards are done:

    before  rank 0  0STEP 0F0 0F1 2STEP 2F0 2F1 2B0 2B1 2REDUCE_KEPT 2ALL_REDUCE 0B0 0B1 ...
    after   rank 0  2ALL_REDUCE 0STEP 0F0 0F1 2STEP 2F0 2F1 2B0 2B1 2REDUCE_KEPT 2ALL_REDUCE:500
                    0B0 0B1 0REDUCE_KEPT 0ALL_REDUCE 2FINALIZE 0FINALIZE

If all-gathers follow the steps, the rest of a stage's sum follows the all-gather of the previous
stage, so the link carries data in the order in which the forwards need it.
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from itertools import pairwise

from megatron.fold3d.plan.ir import WHOLE, Action, Op, Program, carried, per_rank
from megatron.fold3d.plan.ops import SUM_OPS

_NEED_STEP = frozenset({Op.FORWARD, Op.ALL_GATHER})


@per_rank
def carry_grad_sync(program: Program, stages: Container[int]) -> Iterator[Action]:
    """Let DP.sync of ``stages`` reach into the next iteration: paper Algorithm 2, the free split.

    STEP moves right before the stage's ALL_GATHER or, without one, between the receive of the first
    forward and this forward. REDUCE_KEPT sums gradients that Megatron reads after the backwards.
    """
    already = carried(program)
    moved = {
        stage for stage, op, _ in program if op is Op.STEP and stage in stages
    } - already.keys()
    left = set(moved)
    kept: list[int] = []
    end = len(program)  # index of the first step at the end
    while end and program[end - 1].op is Op.STEP:
        end -= 1

    for action in program[:end]:
        stage, op, _ = action
        if op in _NEED_STEP and stage in left:
            left.remove(stage)
            yield Action(stage, Op.STEP)
        if op in SUM_OPS and stage in moved and stage not in kept:
            kept.append(stage)
            yield Action(stage, Op.REDUCE_KEPT)
        if op is not Op.STEP or stage not in moved:
            yield action
    yield from (Action(stage, Op.FINALIZE) for stage in kept)
    yield from (action for action in program[end:] if action.stage not in moved)


@per_rank
def share_grad_sync(program: Program, shares: Sequence[float]) -> Iterator[Action]:
    """Start a part of each carried sum in its iteration, and the rest in the next one.

    Between weight gradients only some gradients are complete. So the share ends with the stage's
    last sum, when all gradients are complete, and earlier parts end before the share.

    Args:
        program: a program with carried stages, whose sums all start in their own iteration.
        shares: by stage, the part that starts in its own iteration; rounded to thousandths.
    """
    late = carried(program)
    stages = sorted({a.stage for a in program if a.op is Op.STEP})
    last = {action.stage: action for action in program if action.op in SUM_OPS}
    limit = {stage: round(shares[stage] * WHOLE) for stage in late}
    rest = {stage: last[stage].until(WHOLE) for stage in late if limit[stage] < WHOLE}
    gathered = {a.stage for a in program if a.op is Op.ALL_GATHER}
    follows = {b: a for a, b in pairwise(stages) if b in rest and a in gathered}
    behind = {Action(before, Op.ALL_GATHER): rest[stage] for stage, before in follows.items()}
    begun: defaultdict[int, int] = defaultdict(int)

    yield from (rest[stage] for stage in stages[1:] if stage in rest and stage not in follows)
    end = backwards_end(program)
    for index, action in enumerate(program):
        stage = action.stage
        if index == end:
            yield from (rest[first] for first in stages[:1] if first in rest)
        if action.op in SUM_OPS and stage in rest:
            until = min(action.end, limit[stage] - (action != last[stage]))
            if until > begun[stage]:
                begun[stage] = until
                yield action._replace(microbatch=until)
            continue
        yield action
        if action in behind:
            yield behind[action]


def backwards_end(program: Program) -> int:
    """Return the index of the first FINALIZE, which follows all sums of backwards; else the end."""
    ends = (i for i, action in enumerate(program) if action.op is Op.FINALIZE)
    return next(ends, len(program))
