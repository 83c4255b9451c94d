"""Simulate a candidate's plan as stock Megatron, or our runtime, would run it.

Stock Megatron waits for transfers before it goes on (`sends_stock_waits_for`). It starts a chunk's
DP.sync on all ranks at once, so on rank r it starts r backwards late, and it always ends with the
iteration.
"""

from dataclasses import replace

from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.compile import GradSync, Options, lower
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.launches import launches
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.simulated_shares import auto_shares
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.execution import Device, Execution, sends_stock_waits_for
from megatron.fold3d.predict.simulator.simulate import simulate

_STEADY = 3  # iterations until a plan that defers DP.sync is steady
PAUSE_SHARE = 0.5  # what PP.sync may take from DP.sync before they share fairly


def plan_of(candidate: Candidate) -> Plan:
    """Return the plan, with DP.sync where the candidate has it."""
    deferred = candidate.backward_share is not None
    num_stages = candidate.num_ranks * candidate.num_segments
    options = Options(
        delay_weight_grads=candidate.delayed_weight_grads,
        gathers_params=candidate.setup.distributed_optimizer and not deferred,
        offload=OffloadChoice() if candidate.offload else None,
        transfers=False,
        grad_sync="overlap" if deferred else _grad_sync(candidate),
        deferred_stages=range(num_stages if deferred else 0),
    )
    return lower(_order(candidate), options)


def timeline_of(candidate: Candidate, estimate: Estimate) -> Timeline:
    """Return the simulated iterations of a candidate; the last one is steady."""
    plan, costs, share = plan_of(candidate), estimate.costs, candidate.backward_share
    execution = Execution(
        nic_of_rank=estimate.nic_of_rank,
        preemptive=candidate.preemptive,
        pause_share=PAUSE_SHARE,
        in_order=True,
        flush=share is None,
        sends_waited_for=_sends_waited_for(candidate),
        device=_device(candidate, estimate),
    )
    if share is None:
        return simulate(plan, _stepping_last(costs, candidate.num_ranks), execution)
    shares = auto_shares(plan, costs, execution) if share == "auto" else (share,) * plan.num_stages
    return simulate(plan, costs, replace(execution, backward_share=shares), iterations=_STEADY)


def without_grad_sync(candidate: Candidate) -> Candidate:
    """Return the candidate that stands for all that differ only in DP.sync and host copies."""
    setup = replace(candidate.setup, distributed_optimizer=False)
    return replace(candidate, setup=setup, backward_share=None, offload=False, preemptive=False)


def undisturbed_s(candidate: Candidate, estimate: Estimate) -> float:
    """Return the seconds of an iteration without DP.sync, host copies and contention on links.

    Orders are fixed, so whatever a candidate adds to this can only make a rank wait longer. Without
    flows on a network it takes a fraction of the time to simulate.
    """
    costs = estimate.costs
    message_s = costs.p2p_s
    if len(set(estimate.nic_of_rank)) < candidate.num_ranks:
        message_s = min(message_s, costs.p2p_local_s)
    alone = replace(
        costs, p2p_s=0.0, p2p_local_s=0.0, p2p_latency_s=costs.p2p_latency_s + message_s
    )
    execution = Execution(sends_waited_for=_sends_waited_for(candidate))
    plan = delay_weight_grads(_order(candidate), candidate.delayed_weight_grads)
    return simulate(plan, alone, execution).period_s


def launches_in_backward(candidate: Candidate, estimate: Estimate) -> bool:
    """Whether DP.sync of a stage begins inside its last backward, as far as it is modelled."""
    ends_with_iteration = candidate.backward_share is None
    return estimate.cuda_connections is not None and ends_with_iteration and not candidate.is_stock


def _device(candidate: Candidate, estimate: Estimate) -> Device | None:
    """Return the GPUs that run a candidate, if their streams share queues.

    Stock launches one collective per model chunk, where its schedule starts DP.sync.
    """
    if estimate.cuda_connections is None:
        return None
    if candidate.is_stock:
        return Device(connections=estimate.cuda_connections)
    deferred = candidate.backward_share is not None
    return Device(
        connections=estimate.cuda_connections,
        launches=launches(estimate.gradient_bytes, candidate.setup, deferred=deferred),
        in_backward=launches_in_backward(candidate, estimate),
    )


def _grad_sync(candidate: Candidate) -> GradSync:
    if candidate.schedule == "1f1b":  # its hooks start in the last backward, if at all
        return "serial"
    return "aligned" if candidate.is_stock else "overlap"


def _order(candidate: Candidate) -> Plan:
    return build(
        candidate.schedule,
        num_ranks=candidate.num_ranks,
        num_segments=candidate.num_segments,
        num_microbatches=candidate.num_microbatches,
        group_size=candidate.group_size,
    )


def _sends_waited_for(candidate: Candidate) -> frozenset[Op]:
    return sends_stock_waits_for(candidate.num_segments) if candidate.is_stock else frozenset()


def _stepping_last(costs: Costs, num_ranks: int) -> Costs:
    """Charge the optimizer's step to the stages that end last, when all gradients are there."""
    steps = costs.optimizer_s
    first = tuple(sum(steps[rank::num_ranks]) for rank in range(num_ranks))
    return replace(costs, optimizer_s=first + (0.0,) * (len(steps) - num_ranks))
