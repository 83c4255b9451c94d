"""The choices that ``--schedule auto`` would try, with predictions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.policy.predicted import Predicted
from megatron.fold3d.predict.cost_model.sizes import replicated_bytes
from megatron.fold3d.predict.search.descent import Descent, Space, orders_worth_trying
from megatron.fold3d.predict.search.judge import Judge
from megatron.fold3d.predict.search.settled import PredictedRun
from megatron.fold3d.predict.simulator.execution import Execution


def tries(run: PredictedRun, config: Fold3DConfig) -> tuple[Predicted, ...]:
    """Return stock's order, and what training is predicted to try behind it.

    Args:
        run: the run, in stock's order.
        config: its configuration, which says what may be chosen.
    """
    c, known, shape = run.candidate, run.known, run.shape

    def fits(choice: Choice, plan: Plan) -> bool:
        if shape is None:
            return True
        held, whole = run.held_sizes(plan), choice.stages(plan.num_ranks, optimizer="replicated")
        more = replicated_bytes(shape, c.setup, plan.num_ranks, c.layers, whole)
        ranks = zip(held.peaks(plan), more, held.most, strict=True)
        return all(peak + extra <= most for peak, extra, most in ranks)

    judge = Judge(
        num_ranks=config.num_ranks,
        num_microbatches=c.num_microbatches,
        costs=known.costs,
        features=replace(config.features, transfers=False),
        execution=Execution(
            in_order=True,
            preemptive=False,
            nic_of_rank=known.nic_of_rank,
            routes=known.routes,
            shard_shares=known.shard_shares,
        ),
        fits=fits,
        held=run.held_sizes,
    )
    first = replace(config.choice, order=config.choice.schedule)
    free = config.free(c.setup.data_parallel)
    for key, seconds in (("step", known.costs.grad_sync_s), ("wgrad", known.costs.weight_s)):
        if not any(seconds):
            free.pop(key, None)
    orders = orders_worth_trying(judge, first, keeps_forwards=config.keeps_forwards)
    search = Descent(judge, Space(orders=orders, free=free, tied=config.ties_embeddings))
    return search.first, *search.to_try()


def lines(stock: Predicted, tried: Sequence[Predicted]) -> Iterator[str]:
    """Yield what would be tried, and the speed-up over stock's order, in lines."""
    rows = [("stock's order", stock), *(("tries", one) for one in tried)]
    width = max(len(str(one.choice)) for _, one in rows)
    for title, one in rows:
        faster = "" if one is stock else f"  {stock.seconds / one.seconds:.2f} x"
        yield f"{title:<15}{one.choice!s:<{width}}  {one.seconds:.6g} s{faster}"
    if not tried:
        yield "nothing that fits is predicted to be faster"
