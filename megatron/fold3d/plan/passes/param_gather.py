"""The pass that makes the all-gather of a distributed optimizer's parameters part of a plan.

The optimizer updates each parameter on one replica, in shards; the next forward gathers them. A
stage's gather starts one segment ahead of its first forward:

    before  rank 0  0F0 2F0 2B0 0B0
    after   rank 0  0ALL_GATHER 2ALL_GATHER 0F0 2F0 2B0 0B0

A replicated stage is updated on every replica, so it is not gathered, and the other all-gathers
start one segment earlier.
"""

from collections.abc import Container, Iterator

from megatron.fold3d.plan.ir import Action, Op, Plan, Program


def add_param_gather(plan: Plan, replicated: Container[int] = ()) -> Plan:
    """Let each rank gather its stages in the order in which it needs them.

    The first all-gather is the program's first action. Each further one starts before the first
    forward of the stage before, which it overlaps. A plan with all-gathers is returned unchanged.
    """
    if plan.has(Op.ALL_GATHER):
        return plan
    return plan.lowered(lambda program: _with_param_gather(program, replicated))


def _with_param_gather(program: Program, replicated: Container[int]) -> Iterator[Action]:
    stages = list(dict.fromkeys(stage for stage, op, _ in program if op is Op.FORWARD))
    gathered = [stage for stage in stages if stage not in replicated]
    starting = dict(zip(stages, gathered[1:], strict=False))  # before a stage's first forward

    for stage in gathered[:1]:
        yield Action(stage, Op.ALL_GATHER)
    waiting = set(stages)
    for action in program:
        stage, op, _ = action
        if op is Op.FORWARD and stage in waiting:
            waiting.remove(stage)
            if stage in starting:
                yield Action(starting[stage], Op.ALL_GATHER)
        yield action
