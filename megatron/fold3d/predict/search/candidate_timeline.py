"""Simulate a candidate's plan as stock Megatron, or our runtime, would run it.

Stock Megatron waits for some transfers (`sends_stock_waits_for`). With one hardware queue, stock is
simulated with our early or our late receives, whichever is faster. Stock starts a chunk's DP.sync
on all ranks at the same time, so rank r starts DP.sync r backwards late. Stock's DP.sync always
ends with the iteration.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.device_queues import CONNECTIONS, MOST_OUTSTANDING
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.memory import HeldSizes
from megatron.fold3d.plan.passes.pairs import pair_microbatches
from megatron.fold3d.plan.passes.recompute import recompute_early
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.launches import launches
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.judge import Judge, Simulated
from megatron.fold3d.predict.simulator.link import Device, sends_stock_waits_for
from megatron.fold3d.predict.simulator.simulate import simulate

PAUSE_SHARE = 0.5  # of the time, PP.sync may pause DP.sync; then the two share links fairly


def judge_of(
    candidate: Candidate,
    estimate: Estimate,
    *,
    memory_bytes: float | None = None,
    fits: Callable[[Simulated], bool] = lambda found: True,
    waits_for_sends: bool = True,
    connections: int | None = None,
) -> Judge:
    """Return a judge that predicts a candidate's iterations.

    Args:
        memory_bytes: a GPU's memory, which delayed weight gradients may fill; None limits them to
            the peak of the fullest rank without them.
        connections: hardware queues of a GPU, if other than the estimate's.
    """
    late = estimate.cuda_connections == 1
    sliced, choice = is_sliced(candidate, estimate), candidate.choice
    job = replace(candidate.job, receives_late=late)

    return Judge(
        job=job,
        costs=estimate.costs if job.gathers_params else estimate.costs.gathered_in_steps(),
        transfers=late or bool(choice.pairs),
        may_receive_early=candidate.is_stock,  # stock's own receives are no worse than ours
        link=estimate.link(
            preemptive=candidate.preemptive,
            pause_share=PAUSE_SHARE,
            sends_waited_for=_sends_waited_for(candidate) if waits_for_sends else frozenset(),
            device=_device(candidate, estimate, connections, sliced),
            overlap_tensor_parallel=bool(choice.pairs),
            combined=candidate.combined,
        ),
        cuts_slices=sliced,
        held=_held(estimate, memory_bytes) if choice.fills_gaps else None,
        fits=fits,
    )


def _held(estimate: Estimate, memory_bytes: float | None) -> HeldSizes | None:
    """Return the bytes that micro-batches hold, and each rank's room for them, if known."""
    if memory_bytes is None:
        return None
    known, ranks = estimate.footprint, len(estimate.nic_of_rank)
    working = known.working_bytes or (0.0,) * len(known.saved_bytes)
    left = (
        memory_bytes - static - max(working[rank::ranks])
        for rank, static in enumerate(known.static_bytes)
    )
    return HeldSizes(saved=known.saved_bytes, delayed=known.delayed_bytes, most=tuple(left))


def timeline_of(candidate: Candidate, estimate: Estimate, **options: Any) -> Timeline:
    """Return the simulated iterations of a candidate; the last one is steady."""
    return judge_of(candidate, estimate, **options).simulated().timeline


def many_queues_s(
    candidate: Candidate, estimate: Estimate, *, memory_bytes: float | None = None
) -> tuple[float, float]:
    """Return a lower and an upper bound on an iteration's seconds with 32 hardware queues.

    One queue starts the collective of an input gradient before the weight gradient that hides it.
    With 32 queues the collective may start after the weight gradient. So the upper bound adds the
    TP.sync of all backwards of a rank.
    """
    timeline = timeline_of(
        candidate, estimate, memory_bytes=memory_bytes, connections=max(CONNECTIONS)
    )
    sync_s, ranks = estimate.costs.tp_sync_s, candidate.num_ranks
    hidden_s = candidate.num_microbatches * max(sum(sync_s[rank::ranks]) for rank in range(ranks))
    return timeline.period_s, timeline.period_s + hidden_s


def without_grad_sync(candidate: Candidate) -> Candidate:
    """Return the candidate without DP.sync and host copies: equal for all that differ in these."""
    setup = replace(
        candidate.setup,
        distributed_optimizer=False,
        optimizer_instances=1,
        small_gradients=False,
        accumulates_in_fp32=False,
        scatters_in_fp32=False,
        gathered_bits=0.0,
        summed_bits=0.0,
    )
    choice = candidate.choice.in_iteration().changed(optimizer="sharded")
    return replace(
        candidate,
        choice=choice,
        setup=setup,
        shards="off",
        offload=False,
        preemptive=False,
        aligned=True,
    )


def undisturbed(candidate: Candidate, estimate: Estimate) -> Timeline:
    """Return an iteration without DP.sync, host copies and contention on links.

    This iteration is a lower bound: with a fixed order, DP.sync and contention can only make ranks
    wait longer. Its simulation is short, since no flows share a network.
    """
    choice = candidate.choice
    link = estimate.link(
        contended=False,
        sends_waited_for=_sends_waited_for(candidate),
        overlap_tensor_parallel=bool(choice.pairs),
        combined=candidate.combined,
    )
    apart = *choice.where(wgrad="behind"), *choice.where(wgrad="last")
    plan = delay_weight_grads(computed(candidate), tuple(sorted(apart)))
    if choice.pairs and plan.num_ranks > 1:
        plan = pair_microbatches(add_p2p(plan, in_pairs=True))
    return simulate(plan, replace(estimate.costs, ep_sync_on_nic=False), link)


def launches_in_backward(candidate: Candidate, estimate: Estimate) -> bool:
    """Return True if a stage's DP.sync starts inside the stage's last backward."""
    ends_with_iteration = not candidate.choice.carries
    return estimate.cuda_connections is not None and ends_with_iteration and not candidate.is_stock


def is_sliced(candidate: Candidate, estimate: Estimate) -> bool:
    """Return True if the plan has slices of DP.sync, as with ``slices=on``."""
    if candidate.flags is not None or candidate.choice.slices is not None:
        return bool(candidate.choice.slices)
    if candidate.preemptive or estimate.launches:
        return False
    return estimate.cuda_connections == 1 and candidate.choice.carries


def _device(
    candidate: Candidate, estimate: Estimate, connections: int | None, sliced: bool
) -> Device | None:
    """Return the rules of the GPUs that run a candidate, if their streams share queues.

    Stock launches one collective per model chunk, where stock's schedule starts DP.sync.
    """
    if estimate.cuda_connections is None:
        return None
    queues = connections or estimate.cuda_connections
    if candidate.is_stock or sliced:
        return Device(connections=queues)
    return Device(
        connections=queues,
        launches=estimate.launches
        or launches(
            estimate.gradient_bytes,
            candidate.setup,
            deferred=candidate.choice.carries,
            connections=estimate.cuda_connections,
        ),
        in_backward=launches_in_backward(candidate, estimate),
        # With preemption a separate thread launches slices, so the host never waits.
        most_outstanding=None if candidate.preemptive else MOST_OUTSTANDING,
    )


def computed(candidate: Candidate) -> Plan:
    """Return the candidate's order of computation, with early recomputations."""
    choice = candidate.choice
    early = choice.stages(candidate.num_ranks, recompute="early")
    return recompute_early(candidate.job.computed, early, in_pairs=bool(choice.pairs))


def _sends_waited_for(candidate: Candidate) -> frozenset[Op]:
    return sends_stock_waits_for(candidate.num_segments) if candidate.is_stock else frozenset()
