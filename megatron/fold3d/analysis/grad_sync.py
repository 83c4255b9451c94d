"""Where stock Megatron and a schedule that defers it put DP.sync: passes over a compute plan.

Beside `lowering.add_grad_sync`, which starts a stage's reduction with its last backward and waits
for all of them at the end.
"""

from megatron.fold3d.plan.ir import Op, Plan, Program
from megatron.fold3d.plan.lowering import add_grad_sync, defer_grad_sync


def serial_grad_sync(plan: Plan) -> Plan:
    """Add DP.sync after the last action: stock Megatron without ``--overlap-grad-reduce``."""

    def to_the_end(program: Program) -> Program:
        sync = {op: [a for a in program if a.op is op] for op in (Op.REDUCE_GRAD, Op.WAIT_GRAD)}
        others = (action for action in program if action.op not in sync)
        return (*others, *sync[Op.REDUCE_GRAD], *sync[Op.WAIT_GRAD])

    return Plan(tuple(map(to_the_end, add_grad_sync(plan).programs)))


def deferred_grad_sync(plan: Plan) -> Plan:
    """Add DP.sync that reaches into the next iteration (paper Sec. III-B step 3).

    A stage's reduction starts after its last backward; its first forward waits for the one of the
    iteration before. Only a simulation of several iterations shows what that costs.
    """
    return defer_grad_sync(add_grad_sync(plan), range(plan.num_stages))
