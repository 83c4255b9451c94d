"""The shares that ``--backward-share auto`` would choose, from a simulation.

They are chosen as in training: from the times at which gradients are ready in an iteration with
`FIRST_SHARE`, and from the time that the network needs for them during the backward. With the
distributed optimizer nothing is measured, and everything is reduced during the backward, unless
weight gradients are delayed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron.fold3d.observe.timeline import Lane, Span
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.ops import WEIGHT_OPS
from megatron.fold3d.plan.passes.gather_later import gather_later
from megatron.fold3d.policy.backward_shares import (
    FIRST_SHARE,
    backward_shares,
    busy_s,
    forwards_before_gather,
)
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.execution import Execution
from megatron.fold3d.predict.simulator.simulate import simulate


def auto_shares(plan: Plan, costs: Costs, execution: Execution) -> tuple[float, ...]:
    """Return the share of each stage's DP.sync that fits behind the backwards of its rank.

    Args:
        plan: a plan whose DP.sync is deferred.
        costs: the costs of its stages.
        execution: how the plan is run; its ``backward_share`` is ignored.
    """
    stages, ranks = plan.num_stages, plan.num_ranks
    shares = [0.0] * stages
    if plan.has(Op.GATHER_PARAM) and not plan.has(*WEIGHT_OPS):
        return (1.0,) * stages
    if plan.num_segments == 1 or not costs.grad_sync_s:
        return tuple(shares)  # no backward follows
    first = simulate(plan, costs, replace(execution, backward_share=(FIRST_SHARE,) * stages))
    in_iteration_s = costs.reduced_in_iteration_s or (0.0,) * stages
    late_s = [all_s - own_s for all_s, own_s in zip(costs.grad_sync_s, in_iteration_s, strict=True)]
    at_once_s = [FIRST_SHARE * s + own_s for s, own_s in zip(late_s, in_iteration_s, strict=True)]
    for rank, spans in enumerate(first.ranks):
        own = range(rank, stages, ranks)
        ready_s = _ready_s(spans)
        slower = _slower(spans, ready_s, at_once_s)
        shares[rank::ranks] = backward_shares(
            [ready_s[stage] for stage in own], [slower * late_s[stage] for stage in own]
        )
    return tuple(shares)


def gathered_when_reduced(plan: Plan, costs: Costs, shares: Sequence[float]) -> Plan:
    """Return the plan with all-gathers of parameters where training moves them, given the shares.

    A plan without gathers, or without any DP.sync that is left for the forward, stays as it is.
    """
    if not costs.param_gather_s or not costs.grad_sync_s:
        return plan
    return gather_later(
        plan,
        {
            stage: forwards_before_gather((1 - share) * sync_s, gather_s, plan.num_microbatches)
            for stage, (share, sync_s, gather_s) in enumerate(
                zip(shares, costs.grad_sync_s, costs.param_gather_s, strict=True)
            )
        },
    )


def _ready_s(spans: Sequence[Span]) -> dict[int, float]:
    """Return when each stage's last backward ended, or its first part of weight gradients, in s."""
    ready_s: dict[int, float] = {}
    begun: set[int] = set()
    for span in spans:
        if span.lane is not Lane.COMPUTE or span.action is None or span.action.op is Op.FORWARD:
            continue
        stage, op, _ = span.action
        if op is Op.WEIGHT_PART:
            if stage in begun:
                continue
            begun.add(stage)
        ready_s[stage] = span.end_s
    return ready_s


def _slower(
    spans: Sequence[Span], ready_s: Mapping[int, float], at_once_s: Sequence[float]
) -> float:
    """The factor by which messages slow DP.sync down before the last backward ends.

    DP.sync that ends later counts only if none ended before. The part that is reduced in the
    iteration counts as well. DP.sync that delays a forward does not count, because it belongs to
    the iteration before.
    """
    last_s = max(ready_s.values())
    of_stage: dict[int, list[Span]] = {}
    for span in spans:
        if span.lane is not Lane.GRAD_SYNC or span.action is None:
            continue
        is_reduction = span.action.op in (Op.REDUCE_GRAD, Op.REDUCE_SLICE)
        if is_reduction and ready_s[span.action.stage] <= span.start_s < last_s:
            of_stage.setdefault(span.action.stage, []).append(span)
    ended = {s: its for s, its in of_stage.items() if all(span.end_s <= last_s for span in its)}
    behind = ended or of_stage
    alone_s = sum(at_once_s[stage] for stage in behind)
    there_s = busy_s((span.start_s, span.end_s) for its in behind.values() for span in its)
    return there_s / alone_s if alone_s else 1.0
