"""Show what the run-ahead of AIAO's last segment costs: simulated times over transfer times.

Rank r runs k forwards of the last segment before its first backward of it. Three choices of k:
all m (the paper's Algorithm 1), 2 (p - 1 - r) (the default), p - 1 - r (classic 1F1B). The unit is
a forward; a backward takes two.
"""

from collections.abc import Iterator
from functools import partial

from megatron.fold3d.plan.ir import Action, Op, Plan
from megatron.fold3d.plan.schedules import aiao, one_f_one_b
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate

SIZES = ((4, 2, 8), (8, 4, 16), (8, 2, 32))  # ranks, segments, micro-batches
TRANSFERS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)


def classic(
    rank: int, num_ranks: int, num_segments: int, num_microbatches: int
) -> Iterator[Action]:
    """Yield AIAO with classic 1F1B in its last segment."""
    last = rank + num_ranks * (num_segments - 1)
    others = [
        action
        for action in aiao(rank, num_ranks, num_segments, num_microbatches)
        if action.stage != last
    ]
    yield from (action for action in others if action.op is Op.FORWARD)
    for action in one_f_one_b(rank, num_ranks, num_microbatches):
        yield action._replace(stage=last)
    yield from (action for action in others if action.op is Op.BACKWARD)


def main() -> None:
    """Print one row per size and transfer time."""
    print(f"{'p':>2} {'ns':>2} {'m':>2}  transfer       k=m  2(p-1-r)     p-1-r")
    for num_ranks, num_segments, num_microbatches in SIZES:
        plans = [
            Plan.generate(
                partial(
                    form,
                    num_ranks=num_ranks,
                    num_segments=num_segments,
                    num_microbatches=num_microbatches,
                ),
                num_ranks,
            )
            for form in (partial(aiao, last_segment="afab"), aiao, classic)
        ]
        for transfer in TRANSFERS:
            costs = Costs.uniform(num_ranks * num_segments, p2p_s=transfer)
            times = "".join(f"{simulate(plan, costs).makespan_s:>10.2f}" for plan in plans)
            print(f"{num_ranks:>2} {num_segments:>2} {num_microbatches:>2}  {transfer:>8}{times}")


if __name__ == "__main__":
    main()
