"""Where stock Megatron and a schedule that defers it put DP.sync: passes over a compute plan.

Beside `lowering.add_grad_sync`, which starts a stage's reduction with its last backward and waits
for all of them at the end.
"""

from megatron.fold3d.plan.ir import Action, Op, Plan, Program
from megatron.fold3d.plan.lowering import add_grad_sync, defer_grad_sync


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
    return defer_grad_sync(add_grad_sync(plan), range(plan.num_stages))


def _in_order_of_backwards(program: Program) -> list[int]:
    last = {a.stage: i for i, a in enumerate(program) if a.op in (Op.BACKWARD, Op.WEIGHT)}
    return sorted(last, key=last.__getitem__)
