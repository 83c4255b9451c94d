"""What ``ahead=auto`` and ``wgrad=gaps`` may choose, from the costs of a run."""

from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.plan.passes.place_weight_grads import StageTimes
from megatron.fold3d.policy.forwards_ahead import forwards_that_hide
from megatron.fold3d.predict.simulator.costs import Costs


def worth_trying(costs: Costs, num_ranks: int, num_microbatches: int) -> range:
    """Return the numbers of forwards ahead that may take the least time.

    The largest is two more than are needed to hide the transfers: on a shared link these can still
    help while the pipeline fills. It is below the number of micro-batches, with which the last rank
    but one already runs all forwards first.
    """
    forward_s, backward_s = max(
        zip(costs.forward_s[-num_ranks:], costs.backward_s[-num_ranks:], strict=True), key=sum
    )
    most = forwards_that_hide(forward_s, backward_s, costs.p2p_latency_s + costs.p2p_s) + 2
    return range(1, 1 + max(1, min(most, num_microbatches - 1)))


def stage_times(costs: Costs) -> StageTimes:
    """Return the times that the placement of weight gradients needs.

    Raises:
        PlanError: the costs have no separate time for weight gradients.
    """
    if not any(costs.weight_s):
        raise PlanError(
            "wgrad=gaps: costs have no weight gradients to place; give weight_s, "
            "the part of backward_s that they are"
        )
    return StageTimes(
        forward_s=costs.forward_s,
        backward_s=tuple(
            whole_s - weight_s
            for whole_s, weight_s in zip(costs.backward_s, costs.weight_s, strict=True)
        ),
        weight_s=tuple(weight_s + costs.split_s for weight_s in costs.weight_s),
        transfer_s=costs.p2p_latency_s + costs.p2p_s,
    )
