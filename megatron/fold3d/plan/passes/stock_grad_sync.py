"""Where stock Megatron and a schedule that defers it put DP.sync: passes over a compute plan.

Beside `grad_sync.add_grad_sync`, which starts a stage's reduction with its last backward and waits
for all of them at the end.
"""

from megatron.fold3d.plan.ir import Action, Op, Plan, Program
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync, defer_grad_sync


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


def aligned_grad_sync(plan: Plan) -> Plan:
    """Add DP.sync as stock Megatron's interleaved schedule starts it by default.

    All ranks start a segment's reduction at once: rank r does so r backwards after its last one,
    or at the end of its iteration.
    """
    synced = add_grad_sync(plan).programs
    return Plan(tuple(_late(program, rank) for rank, program in enumerate(synced)))


def _late(program: Program, num_backwards: int) -> Program:
    """Move every REDUCE_GRAD behind so many more backwards."""
    late: list[Action] = []
    due: list[tuple[int, Action]] = []  # after which number of backwards, in order
    done = 0
    for action in program:
        if action.op is Op.WAIT_GRAD:  # the first of those that end the program
            late += [reduce for _, reduce in due]
            due = []
        if action.op is Op.REDUCE_GRAD:
            due.append((done + num_backwards, action))
        else:
            late.append(action)
            done += action.op is Op.BACKWARD
        while due and due[0][0] <= done:
            late.append(due.pop(0)[1])
    return tuple(late)
