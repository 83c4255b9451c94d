"""Pairs: two micro-batches that a rank computes together, each during the other's collectives.

A *chain* is a sequence of neighbouring micro-batches of one stage with the same op (forward,
backward or early recomputation), which begins with an even one. Two sides take the next micro-batch
in turn. Each side's last collective overlaps the other side's computation, so collectives are
exposed only at the ends of a chain. A chain needs no op of its own. `in_pairs` makes an order of
pairs from any order. `pair_microbatches` moves transfers and copies of activations to the place
where a side reaches them: a side sends a result when its micro-batch is done, and by then the other
side has begun the next micro-batch:

    order      rank 0  0F0 0F1 0B0 0B1               numbers are pairs
    in pairs   rank 0  0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3

    before     rank 0  0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0F2 0SEND_F2 ...
    after      rank 0  0F0 0RECV_B0 0F1 0SEND_F0 0F2 0SEND_F1 ... 0SEND_F2

    one side   F0 ─────────────> SEND_F0  F2 ─────────────> SEND_F2
    the other  waits  F1 ─────────────> SEND_F1  F3 ─────────────> SEND_F3
"""

from collections.abc import Iterator

from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError, Program, per_rank
from megatron.fold3d.plan.ops import COPY_OPS, P2P_OPS, RECV_OPS, TO_DEVICE_OPS

PAIRED_OPS = frozenset({Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD})
_BETWEEN = P2P_OPS | COPY_OPS
_BEFORE = RECV_OPS | TO_DEVICE_OPS


def num_pairs(num_microbatches: int) -> int:
    """Return the number of pairs; with an odd number of micro-batches the last pair has one."""
    return (num_microbatches + 1) // 2


@per_rank
def in_pairs(program: Program, num_microbatches: int) -> Iterator[Action]:
    """Replace each computation of a pair by the computations of its two micro-batches.

    Args:
        program: an order of ``num_pairs(num_microbatches)`` pairs, each as one micro-batch.
        num_microbatches: micro-batches of the returned order.
    """
    for stage, op, pair in program:
        first = 2 * (pair or 0)
        for microbatch in range(first, min(first + 2, num_microbatches)):
            yield Action(stage, op, microbatch)


@per_rank
def pair_microbatches(program: Program) -> Iterator[Action]:
    """Move sends and offloads of a chain behind the next micro-batch's computation.

    A chain ends where another action stands between two micro-batches. The returned plan must be
    verified: it deadlocks if two chains wait for each other.
    """
    begin = 0
    for chain in chains(program):
        start = program.index(chain[0], begin)
        yield from program[begin:start]
        begin = start + len(chain)
        leaving: list[Action] = []  # actions of the previous micro-batch
        for action in chain:
            if action.op in PAIRED_OPS:
                yield action
                yield from leaving
                leaving.clear()
            elif action.op in _BEFORE:
                yield action
            else:
                leaving.append(action)
    yield from program[begin:]


def chains(program: Program) -> Iterator[Program]:
    """Yield the chains of a program, from the first computation to the last.

    A chain includes the transfers and copies between its computations, but none after the last.
    """
    begin = 0
    while begin < len(program):
        end = begin + 1
        while (found := _next_of_chain(program, begin, end)) is not None:
            end = found + 1
        if end > begin + 1:
            yield program[begin:end]
        begin = end


def check_pairs(plan: Plan) -> None:
    """Check that a plan has at least one pair.

    Raises:
        PlanError: the plan has no pair.
    """
    if not any(any(chains(program)) for program in plan.programs):
        raise PlanError(
            f"pairs=on: found no pair in a plan of {plan.num_microbatches} "
            "micro-batches; a pair is two neighbours of one stage, the first of them even: raise "
            "--global-batch-size, change the plan file, or drop pairs=on"
        )


def _next_of_chain(program: Program, begin: int, end: int) -> int | None:
    """Return the next index of the chain at ``begin`` that reaches to ``end``; None if it ends."""
    stage, op, microbatch = program[begin]
    if op not in PAIRED_OPS or microbatch is None or microbatch % 2:
        return None
    last = program[end - 1].microbatch or 0
    while end < len(program) and program[end].op in _BETWEEN:
        end += 1
    follows = end < len(program) and program[end] == Action(stage, op, last + 1)
    return end if follows else None
