"""The pass that moves recomputation out of a backward, to the place right before the backward.

A rank then recomputes while it still waits for the gradient (Merak Sec. 5.1). With all stages:

    before  rank 0  0F0 0F1 0B0 0B1
            rank 1  1F0 1F1 1B0 1B1
    after   rank 0  0F0 0F1 0R0 0B0 0R1 0B1
            rank 1  1F0 1F1 1R0 1B0 1R1 1B1
"""

from collections.abc import Container, Iterator
from itertools import zip_longest

from megatron.fold3d.plan.ir import Action, Op, Program, per_rank


@per_rank
def recompute_early(
    program: Program, stages: Container[int], *, in_pairs: bool = False
) -> Iterator[Action]:
    """Recompute each micro-batch of ``stages`` right before its backward, as a separate action.

    The rank holds the recomputed activations until the backward. Nothing else is computed in
    between, so these activations belong to one micro-batch at a time, or to one pair.

    Args:
        program: a program with or without transfers; a receive stays between R and B.
        stages: the stages with full recomputation, whose forwards keep only the layers' inputs.
        in_pairs: whether both micro-batches of a pair are recomputed before both backwards:
            ``0R0 0R1 0B0 0B1``.
    """
    there = set(recomputed(program))

    for action, behind in zip_longest(program, program[1:]):
        of_pair = [action]
        if in_pairs and behind is not None and _are_pair(action, behind):
            of_pair.append(behind)
        for stage, op, microbatch in of_pair:
            if op is Op.BACKWARD and stage in stages and (stage, microbatch) not in there:
                there.add((stage, microbatch))
                yield Action(stage, Op.RECOMPUTE, microbatch)
        yield action


def recomputed(program: Program) -> frozenset[tuple[int, int | None]]:
    """Return the (stage, micro-batch) keys that have a RECOMPUTE action."""
    return frozenset((stage, m) for stage, op, m in program if op is Op.RECOMPUTE)


def _are_pair(first: Action, second: Action) -> bool:
    is_even = first.microbatch is not None and first.microbatch % 2 == 0
    return is_even and second == first._replace(microbatch=(first.microbatch or 0) + 1)
