"""Megatron's ``--overlap-moe-expert-parallel-comm``: a forward and a backward that run as one.

The layers of both take turns, and each computes during the other's all-to-alls. Each rank runs one
more forward ahead, so that neither needs the other's result:

    before  0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
    here    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3

Only Megatron runs this: the planner compares it with `passes.pairs`.
"""

from collections.abc import Iterator
from itertools import pairwise

from megatron.fold3d.plan.ir import Action, Op, Program, per_rank
from megatron.fold3d.plan.schedules import alternate


@per_rank
def one_more_ahead(program: Program) -> Iterator[Action]:
    """Yield the order with each backward one forward later."""
    forwards = [action for action in program if action.op is Op.FORWARD]
    backwards = [action for action in program if action.op is Op.BACKWARD]
    return alternate(forwards, backwards, program.index(backwards[0]))


def combined(program: Program) -> Iterator[tuple[Action, Action]]:
    """Yield each (forward, backward) that run as one: a backward that follows a forward."""
    computed = (action for action in program if action.op in (Op.FORWARD, Op.BACKWARD))
    for first, second in pairwise(computed):
        if (first.op, second.op) == (Op.FORWARD, Op.BACKWARD):
            yield first, second
