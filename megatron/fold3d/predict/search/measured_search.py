"""The search of a run, from its measured times."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Features
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes
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


def predictions(
    *, order: Plan, features: Features, shards: bool = False, **question: Any
) -> Predictions:
    """Return what is predicted for a run.

    Args:
        order: as in `measured_search`.
        features: likewise.
        shards: whether the distributed optimizer is predicted too.
        question: the other arguments of `measured_search`.
    """
    search = partial(measured_search, order=order, **question)
    found = search(features=features)
    # What memory has no room for is not tried: a first choice that fills gaps then fills none.
    has_room = found.first.seconds < inf
    first = found.first if has_room else replace(found.first, order=order)
    sharded = None
    if shards:
        sharded = search(features=replace(features, gathers_params=True), free={}).first
    return Predictions([first, *found.to_try()], sharded)


def measured_search(
    times: MeasuredTimes,
    first: Choice,
    *,
    features: Features,
    order: Plan,
    free: Mapping[str, Sequence[str]],
    frees_order: bool = False,
    frees_ahead: bool = False,
    keeps_forwards: bool = False,
    tied: bool = False,
    parameter_share: float = 1.0,
    shard_shares: tuple[tuple[float, float], ...] = (),
    preemptive: bool = False,
) -> Descent:
    """Return the search of a run that has measured ``times``; DP.sync is of all-reduces.

    Args:
        times: of all stages, as they were measured.
        first: the choice that runs, or that the flags say; what is free begins with its values.
        features: what the run has beside its choice.
        order: the order of ``first``, without weight gradients in gaps.
        free: as in `Space`.
        frees_order: whether other orders may be chosen.
        frees_ahead: whether another number of forwards ahead may be chosen.
        keeps_forwards: whether forwards have to keep their order.
        tied: as in `Space`.
        parameter_share: bytes of the parameters, as a share of those of their gradients.
        shard_shares: as in `Link`.
        preemptive: as in `Link`.
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
        optimizer_s=times.optimizer_s,
    )
    held = times.held
    if features.gathers_params:
        halves = tuple(s / 2 for s in times.grad_sync_s)
        gathers = times.param_gather_s or tuple(s * parameter_share for s in halves)
        costs = replace(costs, grad_sync_s=halves, param_gather_s=gathers)

    def may_hold(plan: Plan) -> HeldSizes:
        if held is None or first.held is not None:
            return HeldSizes.counted(plan, first.held)
        return held

    def judge(choice: Choice) -> Judge:
        whole = choice.stages(order.num_ranks, optimizer="replicated")

        def has_room(plan: Plan) -> bool:
            replicated = choice.where(optimizer="replicated")
            more = sum(times.other_shard_bytes[number] for number in replicated)
            if held is None:
                return more <= times.room_bytes
            peaks = zip(held.peaks(plan), held.most, strict=True)
            return all(peak + more <= most for peak, most in peaks)

        return Judge(
            choice=choice,
            num_ranks=order.num_ranks,
            num_microbatches=order.num_microbatches,
            costs=costs.with_replicated(whole) if features.gathers_params and whole else costs,
            features=replace(features, transfers=False),
            link=Link(preemptive=preemptive, shard_shares=shard_shares),
            has_room=has_room,
            held=may_hold,
            order=None if frees_order or frees_ahead else order,
        )

    orders = [first]
    if frees_order:
        orders = orders_worth_trying(judge, first, keeps_forwards=keeps_forwards)
    elif frees_ahead:
        orders += with_other_forwards_ahead(judge(first))
    if order.num_ranks == 1 and "wgrad" in free:
        free = {**free, "wgrad": [value for value in free["wgrad"] if value != "gaps"]}
    return Descent(judge, Space(orders=orders, free=free, tied=tied))
