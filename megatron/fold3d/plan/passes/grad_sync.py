"""The passes that add DP.sync that ends with its iteration; see also `carried_grad_sync`.

A stage's sum follows its last backward; its step ends the iteration:

    before  rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    after   rank 0  0F0 0F1 2F0 2F1 2B0 2B1 2ALL_REDUCE 0B0 0B1 0ALL_REDUCE 2STEP 0STEP

`serial_grad_sync` is stock Megatron without ``--overlap-grad-reduce``; training can run it too:

    before  rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    after   rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 0ALL_REDUCE 2ALL_REDUCE 2STEP 0STEP

`aligned_grad_sync` is stock's interleaved schedule, whose rank r starts r backwards late:

    before  rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
            rank 1  1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    after   rank 0  0F0 0F1 2F0 2F1 2B0 2B1 2ALL_REDUCE 0B0 0B1 0ALL_REDUCE 2STEP 0STEP
            rank 1  1F0 1F1 3F0 3F1 3B0 3B1 1B0 3ALL_REDUCE 1B1 1ALL_REDUCE 3STEP 1STEP
"""

from collections.abc import Container

from megatron.fold3d.plan.ir import Action, Op, Plan, Program, per_rank
from megatron.fold3d.plan.ops import SUM_OPS, WEIGHT_OPS

_BACKWARD_ENDS = WEIGHT_OPS | {Op.BACKWARD, Op.SEND_B}


@per_rank
def add_grad_sync(program: Program, in_shards: Container[int] = ()) -> Program:
    """Add DP.sync: a stage's sum follows its last backward, and steps end the iteration.

    The sum follows the send of the last backward's result, since PP.sync goes first. DDP's hooks
    may start the sum inside the last backward (paper Algorithm 2, lines 4-10).

    Args:
        in_shards: stages of which each replica steps a shard; other stages are stepped whole.
    """
    lowered = list(program)
    last = {stage: i for i, (stage, op, _) in enumerate(program) if op in _BACKWARD_ENDS}
    in_order = sorted(last, key=last.__getitem__)
    for stage in reversed(in_order):
        op = Op.REDUCE_SCATTER if stage in in_shards else Op.ALL_REDUCE
        lowered.insert(last[stage] + 1, Action(stage, op))
    return (*lowered, *(Action(stage, Op.STEP) for stage in in_order))


def serial_grad_sync(plan: Plan, in_shards: Container[int] = ()) -> Plan:
    """Add DP.sync after the last action: stock Megatron without ``--overlap-grad-reduce``."""

    def to_the_end(program: Program) -> Program:
        sums = sorted(action for action in program if action.op in SUM_OPS)  # as Megatron does
        steps = [action for action in program if action.op is Op.STEP]
        others = (a for a in program if a.op not in SUM_OPS and a.op is not Op.STEP)
        return (*others, *sums, *steps)

    return add_grad_sync(plan, in_shards).lowered(to_the_end)


def aligned_grad_sync(plan: Plan, in_shards: Container[int] = ()) -> Plan:
    """Add DP.sync as stock Megatron's interleaved schedule starts it by default.

    All ranks start a segment's reduction together: rank r starts r backwards after the segment's
    last backward, or at the end of the iteration.
    """
    synced = add_grad_sync(plan, in_shards).programs
    return Plan(tuple(_late(program, rank) for rank, program in enumerate(synced)))


def _late(program: Program, num_backwards: int) -> Program:
    """Move every sum past ``num_backwards`` backwards."""
    late: list[Action] = []
    due: list[tuple[int, Action]] = []  # sums, with the number of backwards before each
    done = 0
    for action in program:
        if action.op is Op.STEP:  # the first step; steps end the program
            late += [reduce for _, reduce in due]
            due = []
        if action.op in SUM_OPS:
            due.append((done + num_backwards, action))
        else:
            late.append(action)
            done += action.op is Op.BACKWARD
        while due and due[0][0] <= done:
            late.append(due.pop(0)[1])
    return tuple(late)
