"""The shares that ``--backward-share auto`` comes to, from a simulation instead of a measurement.

They are decided as training decides them: from when gradients are ready in an iteration that runs
with `FIRST_SHARE`, and from how long the network was busy with them beside the messages.
"""

from collections.abc import Iterable
from typing import Any

from megatron.fold3d.analysis.costs import Costs
from megatron.fold3d.analysis.simulate import simulate
from megatron.fold3d.analysis.timeline import Lane, Span
from megatron.fold3d.plan.free_split import FIRST_SHARE, backward_shares
from megatron.fold3d.plan.ir import Op, Plan


def auto_shares(plan: Plan, costs: Costs, **options: Any) -> tuple[float, ...]:
    """Return the share of each stage's DP.sync that fits behind the backwards of its rank.

    Args:
        plan: whose DP.sync is deferred.
        costs: of its stages.
        options: of `simulate`, except the shares and the number of iterations.
    """
    stages, ranks = plan.num_stages, plan.num_ranks
    shares = [0.0] * stages
    if plan.num_segments == 1 or not costs.grad_sync_s:
        return tuple(shares)  # no backward follows
    first = simulate(
        plan, costs, iterations=2, backward_share=(FIRST_SHARE,) * stages, **options
    )  # what is deferred ends in the second
    kept_back_s = costs.kept_back_s or (0.0,) * stages
    for rank, spans in enumerate(first.ranks):
        own = range(rank, stages, ranks)
        measured = [span for span in spans if span.iteration == 0]
        ready_s, busy_s = _ready_s(measured), _busy_s(measured)
        slower = busy_s / (sum(costs.grad_sync_s[rank::ranks]) or 1.0)
        shares[rank::ranks] = backward_shares(
            [ready_s[stage] for stage in own],
            [slower * (costs.grad_sync_s[stage] - kept_back_s[stage]) for stage in own],
        )
    return tuple(shares)


def _ready_s(spans: Iterable[Span]) -> dict[int, float]:
    """When each stage's last backward ended."""
    return {
        span.action.stage: span.end_s
        for span in spans
        if span.lane is Lane.COMPUTE and span.action and span.action.op is not Op.FORWARD
    }


def _busy_s(spans: Iterable[Span]) -> float:
    """How long at least one DP.sync was on the network."""
    busy_s = until_s = 0.0
    for span in spans:
        if span.lane is Lane.GRAD_SYNC:
            busy_s += max(0.0, span.end_s - max(span.start_s, until_s))
            until_s = max(until_s, span.end_s)
    return busy_s
