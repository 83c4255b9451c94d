"""Pairs: two micro-batches that a rank computes together, each during the other's collectives.

A pair is two adjacent actions with the same op (forward, backward or early recomputation), the same
stage and neighbouring micro-batches, the first of them even. It needs no op of its own. `in_pairs`
makes an order of pairs from any order, and `pair_microbatches` moves transfers out of pairs:

    order      rank 0  0F0 0F1 0B0 0B1               of 2 pairs
    in pairs   rank 0  0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3

    before     rank 0  0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 ...
    after      rank 0  0RECV_B0 0F0 0F1 0SEND_F0 0SEND_F1 ...
"""

from collections.abc import Iterator
from itertools import pairwise

from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError, Program
from megatron.fold3d.plan.ops import P2P_OPS, RECV_OPS

PAIRED_OPS = frozenset({Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD})


def num_pairs(num_microbatches: int) -> int:
    """Return the number of pairs; the last one has one micro-batch if their number is odd."""
    return (num_microbatches + 1) // 2


def in_pairs(order: Plan, num_microbatches: int) -> Plan:
    """Return an order in which each computation of ``order`` becomes those of two micro-batches.

    Args:
        order: an order of computation for ``num_pairs(num_microbatches)`` micro-batches.
        num_microbatches: micro-batches of the order that is returned.
    """

    def expanded(program: Program) -> Iterator[Action]:
        for stage, op, pair in program:
            first = 2 * (pair or 0)
            for microbatch in range(first, min(first + 2, num_microbatches)):
                yield Action(stage, op, microbatch)

    return Plan(tuple(tuple(expanded(program)) for program in order.programs))


def pair_microbatches(plan: Plan) -> Plan:
    """Move transfers out of pairs: receives are posted before both, results are sent after both.

    If there are other actions between two micro-batches, they do not become a pair. The returned
    plan must be verified: it deadlocks if two pairs wait for each other.
    """
    return Plan(tuple(tuple(_with_pairs(program)) for program in plan.programs))


def pairs(program: Program, *, hooks_reduce: bool = False) -> frozenset[Action]:
    """Return the first action of each pair in a program.

    Args:
        program: the program of one rank.
        hooks_reduce: whether DDP's hooks start to reduce gradients inside a stage's last backward.
            They count the gradients of one micro-batch, so this backward and the one before it are
            not a pair.
    """
    last = {action.stage: action for action in program if action.op is Op.BACKWARD}
    alone = frozenset(last.values()) if hooks_reduce else frozenset()
    return frozenset(
        first
        for first, second in pairwise(program)
        if second == second_of(first) and second not in alone
    )


def check_pairs(plan: Plan) -> None:
    """Check that a plan has at least one pair.

    Raises:
        PlanError: the plan has none.
    """
    if not any(map(pairs, plan.programs)):
        raise PlanError(
            f"pairs=on: found no pair in a plan of {plan.num_microbatches} "
            "micro-batches; a pair is two neighbours of one stage, the first of them even: raise "
            "--global-batch-size, change the plan file, or drop pairs=on"
        )


def second_of(first: Action) -> Action | None:
    """Return the action that forms a pair with ``first``, if ``first`` can begin a pair."""
    stage, op, microbatch = first
    if op not in PAIRED_OPS or microbatch is None or microbatch % 2:
        return None
    return Action(stage, op, microbatch + 1)


def _with_pairs(program: Program) -> Iterator[Action]:
    index = 0
    while index < len(program):
        first, behind = program[index], index + 1
        while behind < len(program) and program[behind].op in P2P_OPS:
            behind += 1
        between = program[index + 1 : behind]
        if behind < len(program) and program[behind] == second_of(first):
            yield from (action for action in between if action.op in RECV_OPS)
            yield first
            yield program[behind]
            yield from (action for action in between if action.op not in RECV_OPS)
            index = behind + 1
        else:
            yield first
            index += 1
