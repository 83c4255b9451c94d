"""The choices that ``--schedule auto`` would try, with predictions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.fold3d.commands.console import counted, faster, table
from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.observe.digits import seconds
from megatron.fold3d.policy.predicted import Predicted
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.descent import Descent, Space, orders_worth_trying
from megatron.fold3d.predict.search.search_result import JudgedCandidate
from megatron.fold3d.predict.search.settled import PredictedRun


def tries(run: PredictedRun, config: Fold3DConfig) -> tuple[Predicted, ...]:
    """Return stock's order, and the choices that training is predicted to try after it.

    Args:
        run: the run, in stock's order.
        config: its configuration, which says what may be chosen.
    """
    first = replace(config.choice, order=config.choice.schedule)
    free, open_ = config.free(), replace(run.candidate.job, order=None)
    run = replace(run, candidate=replace(run.candidate, flags=open_))
    orders = orders_worth_trying(run.judge, first, keeps_forwards=config.keeps_forwards)
    search = Descent(run.judge, Space(orders=orders, free=free, tied=config.ties_embeddings))
    return search.first, *search.to_try()


def lines(
    stock: Predicted, tried: Sequence[Predicted], alike: JudgedCandidate | None = None
) -> Iterator[str]:
    """Yield lines that say what would be tried, and what it gains.

    Args:
        alike: the fastest stock of this layout; without it, gains are over stock's order.
    """
    rows = [("stock's order", str(stock.choice), stock.seconds)]
    if alike is not None:
        rows.insert(0, ("stock, same layout", in_full(alike.candidate), alike.iteration_s))
    rows += [("tries", str(one.choice), one.seconds) for one in tried]
    gains = ["", *(faster(rows[0][2] / time_s - 1) for *_, time_s in rows[1:])]
    cells = ((*names, seconds(s), gain) for (*names, s), gain in zip(rows, gains, strict=True))
    yield from table(cells, left=2)
    if not tried:
        yield "nothing that fits is predicted to be faster"


def in_full(stock: Candidate) -> str:
    """Return a configuration of stock in words, with all that its flags set beside the layout."""
    sums = "--use-distributed-optimizer" if stock.setup.distributed_optimizer else "all-reduce"
    segments = counted(stock.num_segments, "segments")
    return f"{stock.name}, {segments}, {sums}, recomputes {stock.setup.asked_recompute}"
