"""The search for the choices that a run with ``--schedule auto`` tries, from its measured times."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.policy.measured_times import MeasuredTimes
from megatron.fold3d.policy.predicted import Predictions
from megatron.fold3d.predict.search.descent import (
    Descent,
    Space,
    orders_worth_trying,
    with_other_forwards_ahead,
)
from megatron.fold3d.predict.search.judge import Judge
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link


def predictions(*, job: Job, shards: bool = False, **question: Any) -> Predictions:
    """Return the predictions for a run's first choice, and for the choices worth trying.

    Args:
        shards: whether to predict the first choice with the distributed optimizer too.
        question: the other arguments of `measured_search`.
    """
    search = partial(measured_search, **question)
    found = search(job=job)
    # If memory has no room for weight gradients in gaps, the first choice leaves them in backwards.
    has_room = found.first.seconds < inf
    first = found.first if has_room else replace(found.first, job=job)
    sharded = None
    if shards:
        sharded = search(job=replace(job, steps_shards=True, gathers_params=True), free={}).first
    return Predictions([first, *found.to_try()], sharded)


def measured_search(
    times: MeasuredTimes,
    job: Job,
    *,
    free: Mapping[str, Sequence[str]],
    frees_order: bool = False,
    frees_ahead: bool = False,
    keeps_forwards: bool = False,
    tied: bool = False,
    shard_shares: tuple[tuple[float, float], ...] = (),
    preemptive: bool = False,
) -> Descent:
    """Return the search of a run.

    Args:
        times: measured times; DP.sync is that of an all-reduce. A step that gathers parameters
            was measured with its all-gathers.
        job: the running job, or the job of the flags; the search begins with its choice. Its
            ``order``, if any, has no weight gradients in gaps.
        keeps_forwards: whether forwards have to keep their order, as with dropout.
    """
    parts = zip(times.backward_s, times.recompute_s, times.weight_s, strict=True)
    costs = Costs(
        forward_s=times.forward_s,
        backward_s=tuple(map(sum, parts)),
        weight_s=times.weight_s,
        recompute_s=times.recompute_s,
        p2p_s=times.transfer_s,
        p2p_latency_s=times.transfer_latency_s,
        rings_are_buffered=times.rings_are_buffered,
        grad_sync_s=times.grad_sync_s,
        param_gather_s=times.param_gather_s,
        optimizer_s=times.optimizer_s,
    )
    held, first = times.held, job.choice
    order = None if frees_order or frees_ahead else job.order
    if job.steps_shards:
        costs = costs.in_shards(job.parameter_share)
    if not job.gathers_params:
        costs = replace(costs, param_gather_s=())

    def of_sums(whole: Sequence[int]) -> Costs:
        if not job.steps_shards:
            return costs
        found = costs.with_replicated(whole) if job.gathers_params else costs
        return found.with_coded_sums(times.sum_shares, whole)

    def judge(choice: Choice) -> Judge:
        whole = choice.stages(job.num_ranks, optimizer="replicated")

        def has_room(plan: Plan) -> bool:
            replicated = choice.where(optimizer="replicated")
            more = sum(times.other_shard_bytes[number] for number in replicated)
            if held is None:
                return more <= times.room_bytes
            peaks = zip(held.peaks(plan), held.most, strict=True)
            return all(peak + more <= most for peak, most in peaks)

        return Judge(
            job=replace(job, choice=choice, shares=(), order=order),
            costs=of_sums(whole),
            link=Link(preemptive=preemptive, shard_shares=shard_shares),
            has_room=has_room,
            held=held,
        )

    orders = [first]
    if frees_order:
        orders = orders_worth_trying(judge, first, keeps_forwards=keeps_forwards)
    elif frees_ahead:
        orders += with_other_forwards_ahead(judge(first))
    return Descent(judge, Space(orders=orders, free=free, tied=tied))
