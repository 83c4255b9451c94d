"""Show what the pipeline-bound regime can gain: simulated iterations over what a transfer takes.

    .venv/bin/python -m scripts.bench.pipeline_bound
    .venv/bin/python -m scripts.bench.pipeline_bound --ranks 8

One replica, equal stages; a forward of a stage takes 1, a backward 2, half of it weight gradients.
With several segments a rank computes as much as with one, and sends as many messages more. Stock
waits for its sends, and its strongest is sought over 1F1B, two and four segments, and groups of p
and m. A time is a multiple of the lower bound that no order beats.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Features
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.policy.predicted import Predicted
from megatron.fold3d.predict.search.descent import Descent, Space, worth_trying
from megatron.fold3d.predict.search.judge import Judge
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link, sends_stock_waits_for
from megatron.fold3d.predict.simulator.lower_bound import Bounds
from megatron.fold3d.predict.simulator.simulate import simulate

SHARES = (0.0, 0.2, 0.4, 0.8)  # of a stage's computation, that a transfer takes
OURS = Link()


def costs_of(num_ranks: int, num_segments: int, transfer: float, recompute: bool) -> Costs:
    """Return the costs of a rank's work, cut into segments."""
    each = 1.0 / num_segments
    return Costs.uniform(
        num_ranks * num_segments,
        forward_s=each,
        backward_s=(3 if recompute else 2) * each,
        recompute_s=each * recompute,
        p2p_s=transfer,
    )


def stock_s(num_ranks: int, num_microbatches: int, costs: partial[Costs]) -> dict[str, float]:
    """Return the iterations of stock's configurations, by name."""
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    found = {}
    for segments in (1, 2, 4):
        for group in (num_ranks, num_microbatches):
            if group == num_ranks or (segments > 1 and group > num_ranks):
                schedule = "1f1b" if segments == 1 else "interleaved"
                plan = build(schedule, num_segments=segments, group_size=group, **sizes)
                waits = replace(OURS, sends_waited_for=sends_stock_waits_for(segments))
                name = schedule if segments == 1 else f"v{segments}-n{group}"
                found[name] = simulate(plan, costs(segments), waits).period_s
    return found


def fastest(costs: Costs, num_ranks: int, num_microbatches: int, *, gaps: bool) -> Predicted:
    """Return 1F1B with the best number of forwards ahead, and weight gradients in gaps if asked."""

    def judge(choice: Choice) -> Judge:
        return Judge(
            choice=choice,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            costs=costs,
            features=Features(transfers=False),
            link=OURS,
        )

    numbers = worth_trying(costs, num_ranks, num_microbatches)
    orders = [Choice.plain("1f1b", 1, ahead=number) for number in numbers]
    free = {"wgrad": ("backward", "gaps")} if gaps else {}
    return Descent(judge, Space(orders=orders, free=free)).best


def rows(num_ranks: int, recompute: bool) -> Iterator[Sequence[str]]:
    """Yield a row per number of micro-batches and transfer."""
    for rounds in (1, 2, 4):
        microbatches = rounds * num_ranks
        for share in SHARES:
            transfer = share * (4 if recompute else 3)
            costs = partial(costs_of, num_ranks, transfer=transfer, recompute=recompute)
            stock = stock_s(num_ranks, microbatches, costs)
            strongest = min(stock, key=stock.__getitem__)

            one = costs(1)
            ahead, placed = (fastest(one, num_ranks, microbatches, gaps=g) for g in (False, True))
            bound_s = Bounds(ahead.order, one).order_s
            yield (
                f"{microbatches}",
                f"{share:.0%}",
                f"{stock['1f1b'] / bound_s:.2f}",
                f"{stock[strongest] / bound_s:.2f} ({strongest})",
                f"{ahead.seconds / bound_s:.2f} (N={ahead.choice.ahead})",
                f"{placed.seconds / bound_s:.2f} (N={placed.choice.ahead})",
                f"{stock['1f1b'] / placed.seconds:.2f}",
                f"{stock[strongest] / placed.seconds:.2f}",
            )


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="(4)")
    parser.add_argument("--recompute", action="store_true", help="full recomputation")
    args = parser.parse_args()
    titles = [
        *("m", "transfer", "stock default", "strongest stock", "forwards ahead"),
        *("and weight gradients", "x default", "x strongest"),
    ]
    print(f"| {' | '.join(titles)} |\n|{'--:|' * len(titles)}")
    for row in rows(args.ranks, args.recompute):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
