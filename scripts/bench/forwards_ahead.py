"""Show what the run-ahead of AIAO's last segment costs: simulated times over transfer times.

Rank r runs k forwards of the last segment before its first backward of it. Choices of k: all m
(the paper's Algorithm 1), and N (p - 1 - r) for N of 3, 2 (the default) and 1 (classic 1F1B). The
unit is a forward; a backward takes two. The last column is the N that hides transfers.
"""

from functools import partial

from megatron.fold3d.plan.schedules import build
from megatron.fold3d.policy.forwards_ahead import forwards_that_hide
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate

SIZES = ((4, 2, 8), (8, 4, 16), (8, 2, 32))  # ranks, segments, micro-batches
TRANSFERS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
FORWARDS_AHEAD = (3, 2, 1)


def main() -> None:
    """Print one row per size and transfer time."""
    columns = "".join(f"{f'N={n}':>10}" for n in FORWARDS_AHEAD)
    print(f"{'p':>2} {'ns':>2} {'m':>2}  transfer       k=m{columns}  hides")
    for num_ranks, num_segments, num_microbatches in SIZES:
        order = partial(
            build,
            num_ranks=num_ranks,
            num_segments=num_segments,
            num_microbatches=num_microbatches,
        )
        plans = [order("afab"), *(order("aiao", forwards_ahead=n) for n in FORWARDS_AHEAD)]
        for transfer in TRANSFERS:
            costs = Costs.uniform(num_ranks * num_segments, p2p_s=transfer)
            times = "".join(f"{simulate(plan, costs).makespan_s:>10.2f}" for plan in plans)
            hides = forwards_that_hide(1.0, 2.0, transfer)
            size = f"{num_ranks:>2} {num_segments:>2} {num_microbatches:>2}"
            print(f"{size}  {transfer:>8}{times}  {hides:>5}")


if __name__ == "__main__":
    main()
