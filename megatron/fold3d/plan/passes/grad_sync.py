"""The pass that adds DP.sync within an iteration; `carried_grad_sync` lets it reach further.

A stage's sum starts at its last backward; its step is at the end of the iteration:

    before  rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    after   rank 0  0F0 0F1 2F0 2F1 2B0 2B1 2ALL_REDUCE 0B0 0B1 0ALL_REDUCE 2STEP 0STEP
"""

from collections.abc import Container

from megatron.fold3d.plan.ir import Action, Op, Program, per_rank
from megatron.fold3d.plan.ops import WEIGHT_OPS

_BACKWARD_ENDS = WEIGHT_OPS | {Op.BACKWARD, Op.SEND_B}


@per_rank
def add_grad_sync(program: Program, in_shards: Container[int] = ()) -> Program:
    """Add DP.sync: start a stage's sum with its last backward, step after the last action.

    The sum follows the stage's last backward and its send: PP.sync goes first. Gradients that
    become ready inside that backward may start to travel inside it (paper Algorithm 2, lines 4-10).

    Args:
        program: without DP.sync of gradients.
        in_shards: stages of which each replica steps a shard; of the others, each steps all.
    """
    lowered = list(program)
    last = {stage: i for i, (stage, op, _) in enumerate(program) if op in _BACKWARD_ENDS}
    in_order = sorted(last, key=last.__getitem__)
    for stage in reversed(in_order):
        op = Op.REDUCE_SCATTER if stage in in_shards else Op.ALL_REDUCE
        lowered.insert(last[stage] + 1, Action(stage, op))
    return (*lowered, *(Action(stage, Op.STEP) for stage in in_order))
