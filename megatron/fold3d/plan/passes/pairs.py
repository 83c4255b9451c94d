"""Pairs: two micro-batches that a rank computes together, each during the other's collectives.

Neighbours of one stage with the same op (forward, backward or early recomputation), the first of
them even, are a *chain*. Two sides take the next one in turn, so that a side's last collective is
hidden by what the other side has taken, and only the ends of a chain hide nothing. A chain needs no
op of its own. `in_pairs` makes an order of pairs from any order, and `pair_microbatches` puts
transfers and copies of activations where a side comes to them: what a micro-batch gives leaves when
it is through, and by then the other side has begun the next:

    order      rank 0  0F0 0F1 0B0 0B1               of 2 pairs
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
    """Return the number of pairs; the last one has one micro-batch if their number is odd."""
    return (num_microbatches + 1) // 2


@per_rank
def in_pairs(program: Program, num_microbatches: int) -> Iterator[Action]:
    """Return an order in which each computation becomes those of two micro-batches.

    Args:
        program: of an order of computation for ``num_pairs(num_microbatches)`` micro-batches.
        num_microbatches: micro-batches of the order that is returned.
    """
    for stage, op, pair in program:
        first = 2 * (pair or 0)
        for microbatch in range(first, min(first + 2, num_microbatches)):
            yield Action(stage, op, microbatch)


@per_rank
def pair_microbatches(program: Program) -> Iterator[Action]:
    """Send a result, and start to offload, when the next micro-batch of a chain has begun.

    If there are other actions between two micro-batches, a chain ends there. The returned plan must
    be verified: it deadlocks if two chains wait for each other.
    """
    begin = 0
    for chain in chains(program):
        start = program.index(chain[0], begin)
        yield from program[begin:start]
        begin = start + len(chain)
        leaving: list[Action] = []  # of the micro-batch before
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

    With them are the transfers and copies between; those of the last two micro-batches follow.
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
        PlanError: the plan has none.
    """
    if not any(any(chains(program)) for program in plan.programs):
        raise PlanError(
            f"pairs=on: found no pair in a plan of {plan.num_microbatches} "
            "micro-batches; a pair is two neighbours of one stage, the first of them even: raise "
            "--global-batch-size, change the plan file, or drop pairs=on"
        )


def _next_of_chain(program: Program, begin: int, end: int) -> int | None:
    """Return where the chain that begins there, and reaches to ``end``, goes on, if it does."""
    stage, op, microbatch = program[begin]
    if op not in PAIRED_OPS or microbatch is None or microbatch % 2:
        return None
    last = program[end - 1].microbatch or 0
    while end < len(program) and program[end].op in _BETWEEN:
        end += 1
    follows = end < len(program) and program[end] == Action(stage, op, last + 1)
    return end if follows else None
