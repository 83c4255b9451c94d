"""The choices that ``--schedule auto`` would try, with predictions."""

from collections.abc import Iterator, Sequence

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.policy.run_choice import RunChoice
from megatron.fold3d.predict.cost_model.sizes import replicated_bytes
from megatron.fold3d.predict.search.choice_search import ChoiceSearch, Predicted, Scope
from megatron.fold3d.predict.search.settled import PredictedRun


def tries(run: PredictedRun, config: Fold3DConfig) -> tuple[Predicted, ...]:
    """Return stock's order, and what training is predicted to try behind it.

    Args:
        run: the run, in stock's order.
        config: its configuration, which says what may be chosen.
    """
    c, known, shape = run.candidate, run.known, run.shape
    cuts = config.may_cut_sums(c.setup.data_parallel)

    def fits(choice: RunChoice, plan: Plan) -> bool:
        if shape is None:
            return True
        held = run.held_sizes(plan)
        more = replicated_bytes(shape, c.setup, plan.num_ranks, c.layers, choice.replicated_stages)
        ranks = zip(held.peaks(plan), more, held.most, strict=True)
        return all(peak + extra <= most for peak, extra, most in ranks)

    search = ChoiceSearch(
        num_ranks=config.num_ranks,
        num_segments=config.num_segments,
        num_microbatches=c.num_microbatches,
        costs=known.costs,
        scope=Scope(
            defers=config.auto_defers and cuts and any(known.costs.grad_sync_s),
            delays=config.auto_delays and any(known.costs.weight_s),
            replicates=config.auto_replicates and cuts,
            gathers=config.gathers_params,
            reduces_early=config.reduces_early,
            tied=config.ties_embeddings,
            keeps_forwards=config.keeps_forwards,
        ),
        group_size=config.microbatch_group_size,
        fits=fits,
        held=run.held_sizes,
        nic_of_rank=known.nic_of_rank,
        routes=known.routes,
        shard_shares=known.shard_shares,
    )
    return search.stock, *search.to_try()


def lines(stock: Predicted, tried: Sequence[Predicted]) -> Iterator[str]:
    """Yield what would be tried, and the speed-up over stock's order, in lines."""
    rows = [("stock's order", stock), *(("tries", one) for one in tried)]
    width = max(len(str(one.choice)) for _, one in rows)
    for title, one in rows:
        faster = "" if one is stock else f"  {stock.seconds / one.seconds:.2f} x"
        yield f"{title:<15}{one.choice!s:<{width}}  {one.seconds:.6g} s{faster}"
    if not tried:
        yield "nothing that fits is predicted to be faster"
