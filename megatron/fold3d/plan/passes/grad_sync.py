"""The passes that add DP.sync: within an iteration, and reaching into the next one.

A stage's reduction starts at its last backward; the wait for it is at the end of the iteration:

    before  rank 0  0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    after   rank 0  0F0 0F1 2F0 2F1 2B0 2B1 2REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD 2WAIT_GRAD 0WAIT_GRAD

`defer_grad_sync` waits before the stage's first forward of the next iteration instead:

    before  rank 0  0F0 0F1 2F0 2F1 2B0 2B1 2REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD 2WAIT_GRAD 0WAIT_GRAD
    after   rank 0  0WAIT_GRAD 0F0 0F1 2WAIT_GRAD 2F0 2F1 2B0 2B1 2REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD

or, in a plan that gathers parameters, before their all-gather, since the step comes first.
"""

from collections.abc import Container, Iterator

from megatron.fold3d.plan.ir import Action, Op, Plan, Program
from megatron.fold3d.plan.ops import WEIGHT_OPS

_NEED_STEP = frozenset({Op.FORWARD, Op.GATHER_PARAM})
_BACKWARD_ENDS = WEIGHT_OPS | {Op.BACKWARD, Op.SEND_B}


def add_grad_sync(plan: Plan) -> Plan:
    """Add DP.sync: start a stage's reduction with its last backward, wait after the last action.

    ``REDUCE_GRAD`` follows the stage's last backward and its send: PP.sync goes first. Gradients
    that become ready inside that backward may start to travel inside it (paper Algorithm 2,
    lines 4-10).
    """
    return Plan(tuple(map(_with_grad_sync, plan.programs)))


def defer_grad_sync(plan: Plan, stages: Container[int]) -> Plan:
    """Let DP.sync of ``stages`` reach into the next iteration: paper Algorithm 2, the free split.

    ``WAIT_GRAD`` is moved to right before the stage's ``GATHER_PARAM`` or, without one, its first
    forward, behind the forward's receive. It waits for ``REDUCE_GRAD`` of the iteration before.
    """
    return Plan(tuple(_with_deferred_wait(program, stages) for program in plan.programs))


def deferred_stages(program: Program) -> frozenset[int]:
    """Return the stages whose gradients are waited for before their first forward."""
    begun: set[int] = set()
    deferred: set[int] = set()
    for stage, op, _ in program:
        if op is Op.FORWARD:
            begun.add(stage)
        elif op is Op.WAIT_GRAD and stage not in begun:
            deferred.add(stage)
    return frozenset(deferred)


def carried_over(program: Program) -> frozenset[Action]:
    """Return the actions before a deferred WAIT_GRAD: they start the last iteration's DP.sync."""
    found: set[Action] = set()
    starts: dict[int, list[Action]] = {}
    deferred = deferred_stages(program)
    for action in program:
        if action.op is Op.REDUCE_SLICE or action.op is Op.REDUCE_GRAD:
            starts.setdefault(action.stage, []).append(action)
        elif action.op is Op.WAIT_GRAD and action.stage in deferred:
            found.update(starts.get(action.stage, ()))
    return frozenset(found)


def slices_of(program: Program) -> dict[int, list[Action]]:
    """Return, by stage, the actions that start its DP.sync, in the order in which they run.

    A stage without slices has only its REDUCE_GRAD, which is always the last one in a valid plan.
    """
    late = carried_over(program)
    here: dict[int, list[Action]] = {}
    before: dict[int, list[Action]] = {}
    for action in program:
        if action.op is Op.REDUCE_SLICE or action.op is Op.REDUCE_GRAD:
            of_stage = before if action in late else here
            of_stage.setdefault(action.stage, []).append(action)
    return {
        stage: [*here.get(stage, ()), *before.get(stage, ())] for stage in sorted({*here, *before})
    }


def _with_grad_sync(program: Program) -> Program:
    lowered = list(program)
    last = {stage: i for i, (stage, op, _) in enumerate(program) if op in _BACKWARD_ENDS}
    in_order = sorted(last, key=last.__getitem__)
    for stage in reversed(in_order):
        lowered.insert(last[stage] + 1, Action(stage, Op.REDUCE_GRAD))
    return (*lowered, *(Action(stage, Op.WAIT_GRAD) for stage in in_order))


def _with_deferred_wait(program: Program, stages: Container[int]) -> Program:
    waits = {action for action in program if action.op is Op.WAIT_GRAD and action.stage in stages}

    def lower() -> Iterator[Action]:
        moved = set(waits)
        for action in program:
            if action.op in _NEED_STEP and (wait := Action(action.stage, Op.WAIT_GRAD)) in moved:
                moved.remove(wait)
                yield wait
            if action not in waits:
                yield action

    return tuple(lower())
