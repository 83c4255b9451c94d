"""The pass that lets a stage's reduce-scatter overlap the next iteration's first forwards.

`add_param_gather` gathers a stage's parameters one segment ahead of its first forward. If DP.sync
reaches into the next iteration, the stage's reduce-scatter may still be running then. This pass
moves STEP and the all-gather some forwards later:

    before  rank 0  ... 2STEP 2ALL_GATHER 0F0 0F1 2F0 2F1 ...
    after   rank 0  ... 0F0 2STEP 2ALL_GATHER 0F1 2F0 2F1 ...
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from megatron.fold3d.plan.ir import Action, Op, Program, carried, per_rank

_MOVED = (Op.STEP, Op.ALL_GATHER)  # in this order


@per_rank
def gather_later(
    program: Program, shares: Sequence[float], parameter_share: float
) -> Iterator[Action]:
    """Move STEP and all-gather of carried stages behind some forwards.

    The forwards of the previous stage overlap first the rest of the reduce-scatter, then the
    all-gather. They are divided in proportion to the bytes of both. The all-gather of the rank's
    first stage keeps its place.

    Args:
        program: a program with all-gathers and carried DP.sync.
        shares: by stage, the part of the sum that starts in its own iteration.
        parameter_share: bytes of a parameter divided by bytes of its gradient.
    """
    num = Counter(stage for stage, op, _ in program if op is Op.FORWARD)
    before = {stage: earlier for earlier, stage in pairwise(num)}
    forwards = {
        stage: round(num[earlier] * rest / (rest + parameter_share))
        for stage, earlier in before.items()
        if (rest := 1 - shares[stage]) > 0
    }
    gathered = {stage for stage, op, _ in program if op is Op.ALL_GATHER}
    moved = [s for s in before if forwards.get(s) and s in carried(program).keys() & gathered]
    actions = set(program)
    moving = {s: [a for op in _MOVED if (a := Action(s, op)) in actions] for s in moved}
    all_moving = frozenset().union(*moving.values())

    left = {s: forwards[s] for s in moved}  # forwards that still precede the STEP
    for action in program:
        stage, op, _ = action
        runs = stage if op is Op.FORWARD else None
        for s, count in list(left.items()):
            if s == runs or (before[s] == runs and not count):
                del left[s]
                yield from moving[s]
            elif before[s] == runs:
                left[s] -= 1
        if action not in all_moving:
            yield action
