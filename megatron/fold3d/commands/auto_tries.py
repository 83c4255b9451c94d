"""The choices that ``--schedule auto`` would try, with predictions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.policy.predicted import Predicted
from megatron.fold3d.predict.search.descent import Descent, Space, orders_worth_trying
from megatron.fold3d.predict.search.settled import PredictedRun


def tries(run: PredictedRun, config: Fold3DConfig) -> tuple[Predicted, ...]:
    """Return stock's order, and what training is predicted to try behind it.

    Args:
        run: the run, in stock's order.
        config: its configuration, which says what may be chosen.
    """
    costs, first = run.known.costs, replace(config.choice, order=config.choice.schedule)
    free = config.free(run.candidate.setup.data_parallel)
    for key, seconds in (("step", costs.grad_sync_s), ("wgrad", costs.weight_s)):
        if not any(seconds):
            free.pop(key, None)
    orders = orders_worth_trying(run.judge, first, keeps_forwards=config.keeps_forwards)
    search = Descent(run.judge, Space(orders=orders, free=free, tied=config.ties_embeddings))
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
