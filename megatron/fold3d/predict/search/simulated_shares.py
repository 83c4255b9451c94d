"""The shares of DP.sync that ``step=next`` chooses, from a simulation.

Shares are chosen as in training: from the times at which gradients are ready in an iteration with
`FIRST_SHARE`, and from the seconds that their DP.sync takes during the backward. With the
distributed optimizer the whole DP.sync of gradients is started in its iteration, unless weight
gradients are delayed.
"""

from collections.abc import Mapping, Sequence

from megatron.fold3d.observe.timeline import Lane, Span, covered_s
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.ops import GATHER_OPS, PART_OPS, WEIGHT_OPS
from megatron.fold3d.plan.passes.carried_grad_sync import share_grad_sync
from megatron.fold3d.policy.backward_shares import FIRST_SHARE, backward_shares
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.simulate import simulate


def auto_shares(plan: Plan, costs: Costs, link: Link) -> tuple[float, ...]:
    """Return the share of each stage's DP.sync that the backwards of its rank can hide.

    Args:
        plan: a plan with carried DP.sync, all of which starts in its own iteration.
    """
    stages, ranks = plan.num_stages, plan.num_ranks
    shares = [0.0] * stages
    if plan.has(*GATHER_OPS) and not plan.has(*WEIGHT_OPS):
        return (1.0,) * stages
    if plan.num_segments == 1 or not costs.grad_sync_s:
        return tuple(shares)  # no backward follows
    first = simulate(share_grad_sync(plan, (FIRST_SHARE,) * stages), costs, link)
    in_iteration_s = costs.reduced_in_iteration_s or (0.0,) * stages
    late_s = [all_s - own_s for all_s, own_s in zip(costs.grad_sync_s, in_iteration_s, strict=True)]
    at_once_s = [FIRST_SHARE * s + own_s for s, own_s in zip(late_s, in_iteration_s, strict=True)]
    for rank, spans in enumerate(first.ranks):
        own = range(rank, stages, ranks)
        ready_s = _ready_s(spans)
        slowdown = _slowdown(spans, ready_s, at_once_s)
        shares[rank::ranks] = backward_shares(
            [ready_s[stage] for stage in own], [slowdown * late_s[stage] for stage in own]
        )
    return tuple(shares)


def _ready_s(spans: Sequence[Span]) -> dict[int, float]:
    """Return, by stage, when its last backward or first part of weight gradients ended, in s."""
    ready_s: dict[int, float] = {}
    begun: set[int] = set()  # stages with a part
    for span in spans:
        if span.lane is Lane.COMPUTE and span.action is not None:
            if span.action.stage not in begun:
                ready_s[span.action.stage] = span.end_s
            if span.action.op in PART_OPS:
                begun.add(span.action.stage)
    return ready_s


def _slowdown(
    spans: Sequence[Span], ready_s: Mapping[int, float], at_once_s: Sequence[float]
) -> float:
    """Return the factor by which messages slow DP.sync down before the last backward ends.

    DP.sync that ends later counts only if no DP.sync ended before. REDUCE_KEPT counts too. DP.sync
    that delays a forward does not count, since it belongs to the previous iteration.
    """
    last_s = max(ready_s.values())
    of_stage: dict[int, list[Span]] = {}
    for span in spans:
        if span.lane is not Lane.GRAD_SYNC or span.action is None:
            continue
        is_sum = span.action.op not in GATHER_OPS
        if is_sum and ready_s[span.action.stage] <= span.start_s < last_s:
            of_stage.setdefault(span.action.stage, []).append(span)
    ended = {s: sums for s, sums in of_stage.items() if all(span.end_s <= last_s for span in sums)}
    behind = ended or of_stage
    alone_s = sum(at_once_s[stage] for stage in behind)
    there_s = covered_s(span for sums in behind.values() for span in sums)
    return there_s / alone_s if alone_s else 1.0
