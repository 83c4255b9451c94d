"""Where stock Megatron and a schedule that defers it put DP.sync: passes over a compute plan.

Beside `lowering.add_grad_sync`, which starts a stage's reduction with its last backward and waits
for all of them at the end.
"""

from megatron.fold3d.plan.ir import Action, Op, Plan, Program


def serial_grad_sync(plan: Plan) -> Plan:
    """Add DP.sync after the last action: stock Megatron without ``--overlap-grad-reduce``."""

    def lower(program: Program) -> Program:
        stages = _in_order_of_backwards(program)
        reduce = tuple(Action(stage, Op.REDUCE_GRAD) for stage in stages)
        return (*program, *reduce, *(Action(stage, Op.WAIT_GRAD) for stage in stages))

    return Plan(tuple(map(lower, plan.programs)))


def deferred_grad_sync(plan: Plan) -> Plan:
    """Add DP.sync that reaches into the next iteration (paper Sec. III-B step 3).

    A stage's reduction starts after its last backward; its first forward waits for the one of the
    iteration before. Only a simulation of several iterations shows what that costs.
    """

    def lower(program: Program) -> Program:
        ends = {a.stage: i for i, a in enumerate(program) if a.op in (Op.BACKWARD, Op.WEIGHT)}
        begun: set[int] = set()
        lowered: list[Action] = []
        for index, action in enumerate(program):
            if action.op is Op.FORWARD and action.stage not in begun:
                begun.add(action.stage)
                lowered.append(Action(action.stage, Op.WAIT_GRAD))
            lowered.append(action)
            if ends.get(action.stage) == index:
                lowered.append(Action(action.stage, Op.REDUCE_GRAD))
        return tuple(lowered)

    return Plan(tuple(map(lower, plan.programs)))


def _in_order_of_backwards(program: Program) -> list[int]:
    last = {a.stage: i for i, a in enumerate(program) if a.op in (Op.BACKWARD, Op.WEIGHT)}
    return sorted(last, key=last.__getitem__)
