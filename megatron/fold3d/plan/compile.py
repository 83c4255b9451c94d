"""The recipe: from a schedule and its options to a lowered, verified plan."""

from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync
from megatron.fold3d.plan.passes.transfers import add_p2p


def lower(plan: Plan) -> Plan:
    """Return the plan that runs: with the transfers and the gradient sync that it still lacks.

    Raises:
        PlanError: the compute order cannot run.
    """
    if plan.num_ranks > 1 and not plan.has_p2p:
        plan = add_p2p(plan)
    reduces = any(action.op is Op.REDUCE_GRAD for program in plan.programs for action in program)
    return plan if reduces else add_grad_sync(plan)


def forward_only(plan: Plan) -> Plan:
    """Return the forwards of a plan: what evaluation runs."""
    return plan.select({Op.FORWARD})
