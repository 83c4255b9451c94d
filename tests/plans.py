"""Plans that several tests simulate."""

from megatron.fold3d.plan.compile import Options, lower
from megatron.fold3d.plan.ir import Plan


def deferred_grad_sync(order: Plan) -> Plan:
    """The order with DP.sync that reaches into the next iteration (paper Sec. III-B step 3)."""
    return lower(order, Options(transfers=False, deferred_stages=range(order.num_stages)))
