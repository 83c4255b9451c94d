"""The shares that ``--backward-share auto`` would choose, from a simulation.

They are chosen as in training: from the times at which gradients are ready in an iteration with
`FIRST_SHARE`, and from how long the network is busy with them behind the backward.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron.fold3d.observe.timeline import Lane, Span
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.policy.backward_shares import FIRST_SHARE, backward_shares, busy_s
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.execution import Execution
from megatron.fold3d.predict.simulator.simulate import simulate


def auto_shares(plan: Plan, costs: Costs, execution: Execution) -> tuple[float, ...]:
    """Return the share of each stage's DP.sync that fits behind the backwards of its rank.

    Args:
        plan: whose DP.sync is deferred.
        costs: of its stages.
        execution: how the plan is run; its ``backward_share`` is ignored.
    """
    stages, ranks = plan.num_stages, plan.num_ranks
    shares = [0.0] * stages
    if plan.num_segments == 1 or not costs.grad_sync_s:
        return tuple(shares)  # no backward follows
    first = simulate(plan, costs, replace(execution, backward_share=(FIRST_SHARE,) * stages))
    kept_back_s = costs.kept_back_s or (0.0,) * stages
    late_s = [whole - kept for whole, kept in zip(costs.grad_sync_s, kept_back_s, strict=True)]
    at_once_s = [FIRST_SHARE * late + kept for late, kept in zip(late_s, kept_back_s, strict=True)]
    for rank, spans in enumerate(first.ranks):
        own = range(rank, stages, ranks)
        ready_s = _ready_s(spans)
        slower = _slower(spans, max(ready_s.values()), at_once_s)
        shares[rank::ranks] = backward_shares(
            [ready_s[stage] for stage in own], [slower * late_s[stage] for stage in own]
        )
    return tuple(shares)


def _ready_s(spans: Sequence[Span]) -> dict[int, float]:
    """When each stage's last backward ended."""
    return {
        span.action.stage: span.end_s
        for span in spans
        if span.lane is Lane.COMPUTE and span.action and span.action.op is not Op.FORWARD
    }


def _slower(spans: Sequence[Span], last_s: float, at_once_s: Sequence[float]) -> float:
    """The factor by which messages slow DP.sync down before the last backward ends (``last_s``).

    DP.sync that ends later counts only if none ended before. The part kept back counts as well.
    """
    of_stage: dict[int, list[Span]] = {}
    for span in spans:
        if span.lane is Lane.GRAD_SYNC and span.action and span.start_s < last_s:
            of_stage.setdefault(span.action.stage, []).append(span)
    ended = {s: its for s, its in of_stage.items() if all(span.end_s <= last_s for span in its)}
    behind = ended or of_stage
    alone_s = sum(at_once_s[stage] for stage in behind)
    there_s = busy_s((span.start_s, span.end_s) for its in behind.values() for span in its)
    return there_s / alone_s if alone_s else 1.0
