"""Simulate a candidate's plan as stock Megatron, or our runtime, would run it.

Stock Megatron waits for some transfers (`sends_stock_waits_for`). With one hardware queue, it is
simulated with our early or our late receives, whichever is faster. It starts a chunk's DP.sync on
all ranks at the same time, so on rank r it starts r backwards late. Its DP.sync always ends with
the iteration.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Features, GradSync, lower
from megatron.fold3d.plan.compile import order_of as order_of_choice
from megatron.fold3d.plan.device_queues import CONNECTIONS, MOST_OUTSTANDING
from megatron.fold3d.plan.ir import Op, Plan, PlanError
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.passes.pairs import pair_microbatches
from megatron.fold3d.plan.passes.place_weight_grads import (
    HeldSizes,
    placed_orders,
)
from megatron.fold3d.plan.passes.recompute import recompute_early
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.schedule_word import chosen_by
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.launches import launches
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.order_choice import held_sizes, stage_times
from megatron.fold3d.predict.search.simulated_shares import auto_shares, with_shares
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.execution import Device, Execution, sends_stock_waits_for
from megatron.fold3d.predict.simulator.simulate import simulate

_STEADY = 3  # iterations until a plan that defers DP.sync is steady
PAUSE_SHARE = 0.5  # what PP.sync may take from DP.sync before they share fairly


def plan_of(
    candidate: Candidate,
    order: Plan | None = None,
    shares: tuple[float, ...] = (),
    *,
    slices: bool = False,
    transfers: bool = False,
) -> Plan:
    """Return the plan, with DP.sync where the candidate has it.

    Args:
        candidate: the candidate to plan.
        order: an order of computation that replaces its schedule's.
        shares: as in `lower`.
        slices: whether DP.sync is cut into slices.
        transfers: as in `Features`; without them, pairs are made where transfers are added.
    """
    choice = chosen_by(candidate.word, Choice.plain("", candidate.num_segments))
    choice = replace(choice, slices=slices, pairs=choice.pairs and transfers)
    choice = choice.changed(recompute="late")  # the order has early recomputations
    features = Features(
        gathers_params=candidate.setup.distributed_optimizer,
        shards_params=candidate.shards != "off",
        shards_grads=candidate.shards == "gradients",
        transfers=transfers,
        grad_sync="overlap" if choice.carries else _grad_sync(candidate),
        reduces_early=candidate.reduces_early or bool(candidate.behind_backwards),
    )
    return lower(
        order_of(candidate) if order is None else order,
        choice,
        features,
        shares=shares,
        offload=OffloadChoice() if candidate.offload else None,
    )


def timeline_of(
    candidate: Candidate,
    estimate: Estimate,
    *,
    memory_bytes: float | None = None,
    waits_for_sends: bool = True,
    connections: int | None = None,
) -> Timeline:
    """Return the simulated iterations of a candidate; the last one is steady.

    Args:
        candidate: the candidate to simulate.
        estimate: its costs.
        memory_bytes: a GPU's memory, which delayed weight gradients may fill; None is what the
            fullest rank holds without them.
        waits_for_sends: whether stock Megatron waits for its transfers.
        connections: runs the same plan on GPUs with another number of hardware queues.
    """
    simulated = partial(
        simulated_plan,
        candidate,
        estimate,
        waits_for_sends=waits_for_sends,
        connections=connections,
    )
    return _fastest([*map(simulated, _placed(candidate, estimate, memory_bytes))])[1]


def _fastest(simulated: Sequence[tuple[Plan, Timeline]]) -> tuple[Plan, Timeline]:
    if len(simulated) == 1:  # reading a long timeline takes time
        return simulated[0]
    return min(simulated, key=lambda one: one[1].period_s)


def many_queues_s(
    candidate: Candidate, estimate: Estimate, *, memory_bytes: float | None = None
) -> tuple[float, float]:
    """Return the seconds of an iteration with 32 hardware queues: at least, and at most.

    One queue starts the collective of an input gradient before the weight gradient that hides it.
    With 32 it may start behind, so at most the TP.sync of all backwards of a rank is added.
    """
    timeline = timeline_of(
        candidate, estimate, memory_bytes=memory_bytes, connections=max(CONNECTIONS)
    )
    sync_s, ranks = estimate.costs.tp_sync_s, candidate.num_ranks
    hidden_s = candidate.num_microbatches * max(sum(sync_s[rank::ranks]) for rank in range(ranks))
    return timeline.period_s, timeline.period_s + hidden_s


def _placed(candidate: Candidate, estimate: Estimate, memory_bytes: float | None) -> Iterator[Plan]:
    """Yield the candidate's order, or variants with weight gradients in different places.

    If none of the variants fits into memory, backwards stay whole.
    """
    order = order_of(candidate)
    if not candidate.places_weight_grads:
        yield order
        return
    held = HeldSizes.counted(order)
    if memory_bytes is not None:
        held = held_sizes(estimate.footprint, order, memory_bytes)
    try:
        yield from placed_orders(order, stage_times(estimate.costs), held)
    except PlanError:
        yield order


def simulated_plan(
    candidate: Candidate,
    estimate: Estimate,
    order: Plan,
    *,
    waits_for_sends: bool = True,
    connections: int | None = None,
) -> tuple[Plan, Timeline]:
    """Return the plan of a candidate in an order of computation, and its simulated iterations.

    The last iteration is steady. The other arguments are those of `timeline_of`.
    """
    plan, costs, share = plan_of(candidate, order), estimate.costs, candidate.backward_share
    late = estimate.cuda_connections == 1

    def simulated(plan: Plan, costs: Costs, iterations: int = 1) -> tuple[Plan, Timeline]:
        if candidate.overlap_tensor_parallel and plan.num_ranks > 1:
            plan = pair_microbatches(add_p2p(plan, receives_late=late))
            return plan, simulate(plan, costs, execution, iterations=iterations)
        placings = [add_p2p(plan, receives_late=True)] if late and plan.num_ranks > 1 else [plan]
        if late and candidate.is_stock and plan.num_ranks > 1:  # has its own, no worse than ours
            placings.append(add_p2p(plan))
        return _fastest(
            [(p, simulate(p, costs, execution, iterations=iterations)) for p in placings]
        )

    execution = Execution(
        nic_of_rank=estimate.nic_of_rank,
        routes=estimate.routes,
        preemptive=candidate.preemptive,
        pause_share=PAUSE_SHARE,
        in_order=True,
        sends_waited_for=_sends_waited_for(candidate) if waits_for_sends else frozenset(),
        device=_device(candidate, estimate, connections),
        overlap_tensor_parallel=candidate.overlap_tensor_parallel,
        shard_shares=estimate.shard_shares,
    )
    sliced = is_sliced(candidate, estimate)
    if share is None:
        if sliced:
            plan = plan_of(candidate, order, (1.0,) * plan.num_stages, slices=True)
        iterations = 1 if plan.flushes else _STEADY  # a plan of a user's own may carry
        return simulated(plan, _stepping_last(costs, candidate.num_ranks), iterations)
    shares = (share,) * plan.num_stages if share != "auto" else ()
    if not shares:  # slices hold up nothing, so they are chosen as if nothing could
        shares = auto_shares(plan, costs, replace(execution, device=None) if sliced else execution)
    if sliced:
        return simulated(plan_of(candidate, order, shares, slices=True), costs, _STEADY)
    return simulated(with_shares(plan, costs, shares), costs, _STEADY)


def without_grad_sync(candidate: Candidate) -> Candidate:
    """Return the candidate that represents all that differ only in DP.sync and host copies."""
    setup = replace(
        candidate.setup,
        distributed_optimizer=False,
        small_gradients=False,
        accumulates_in_fp32=False,
        scatters_in_fp32=False,
    )
    return replace(
        candidate,
        setup=setup,
        backward_share=None,
        shards="off",
        replicated=(),
        offload=False,
        preemptive=False,
    )


def undisturbed(candidate: Candidate, estimate: Estimate) -> Timeline:
    """Return an iteration without DP.sync, host copies and contention on links.

    This is a lower bound: with a fixed order, everything that a candidate adds can only make ranks
    wait longer. Without flows on a network it takes a fraction of the time to simulate.
    """
    costs = estimate.costs
    message_s = costs.p2p_s
    if len(set(estimate.nic_of_rank)) < candidate.num_ranks:
        message_s = min(message_s, costs.p2p_local_s)
    alone = replace(
        costs, p2p_s=0.0, p2p_local_s=0.0, p2p_latency_s=costs.p2p_latency_s + message_s
    )
    execution = Execution(
        sends_waited_for=_sends_waited_for(candidate),
        overlap_tensor_parallel=candidate.overlap_tensor_parallel,
    )
    plan = delay_weight_grads(order_of(candidate), candidate.delayed_weight_grads)
    if candidate.overlap_tensor_parallel and plan.num_ranks > 1:
        plan = pair_microbatches(add_p2p(plan))
    return simulate(plan, alone, execution)


def launches_in_backward(candidate: Candidate, estimate: Estimate) -> bool:
    """True if DP.sync of a stage is simulated as starting inside its last backward."""
    ends_with_iteration = candidate.backward_share is None
    return estimate.cuda_connections is not None and ends_with_iteration and not candidate.is_stock


def is_sliced(candidate: Candidate, estimate: Estimate) -> bool:
    """Whether training starts DP.sync in the plan's slices: where ``slices=`` says so."""
    if candidate.slices is not None:
        return candidate.slices
    if candidate.preemptive or estimate.launches:
        return False
    return estimate.cuda_connections == 1 and candidate.backward_share is not None


def _device(candidate: Candidate, estimate: Estimate, connections: int | None) -> Device | None:
    """Return the GPUs that run a candidate, if their streams share queues.

    Stock launches one collective per model chunk, where its schedule starts DP.sync.
    """
    if estimate.cuda_connections is None:
        return None
    queues = connections or estimate.cuda_connections
    if candidate.is_stock or is_sliced(candidate, estimate):
        return Device(connections=queues)
    deferred = candidate.backward_share is not None
    return Device(
        connections=queues,
        launches=estimate.launches
        or launches(
            estimate.gradient_bytes,
            candidate.setup,
            deferred=deferred,
            connections=estimate.cuda_connections,
        ),
        in_backward=launches_in_backward(candidate, estimate),
        # With preemption a thread of its own launches slices, so the host runs on.
        most_outstanding=None if candidate.preemptive else MOST_OUTSTANDING,
    )


def _grad_sync(candidate: Candidate) -> GradSync:
    if candidate.sums_last or candidate.schedule == "1f1b":
        return "serial"  # the hooks of 1F1B start in the last backward, if at all
    return "aligned" if candidate.is_stock else "overlap"


def order_of(candidate: Candidate) -> Plan:
    """Return the candidate's order of computation."""
    choice = Choice.plain(
        candidate.schedule,
        candidate.num_segments,
        group=candidate.group_size,
        ahead=candidate.forwards_ahead,
        pairs=candidate.overlap_tensor_parallel,
    )
    order = order_of_choice(choice, candidate.num_ranks, candidate.num_microbatches)
    early = range(order.num_stages if candidate.recompute_early else 0)
    return recompute_early(order, early, in_pairs=candidate.overlap_tensor_parallel)


def _sends_waited_for(candidate: Candidate) -> frozenset[Op]:
    return sends_stock_waits_for(candidate.num_segments) if candidate.is_stock else frozenset()


def _stepping_last(costs: Costs, num_ranks: int) -> Costs:
    """Charge the optimizer's step to the stages that end last, when all gradients are there."""
    if not (steps := costs.optimizer_s):
        return costs
    first = tuple(sum(steps[rank::num_ranks]) for rank in range(num_ranks))
    return replace(costs, optimizer_s=first + (0.0,) * (len(steps) - num_ranks))
