"""How the simulator's time grows with the actions of a plan.

    .venv/bin/python scripts/bench/simulator_speed.py [--pp 64] [--segments 4]

AIAO on one replica of a pipeline, with DP.sync that reaches into the next iteration; the other
replicas do the same. CPU seconds of this process for one iteration, without making the plan; the
goal is 10 s for the last row.
"""

import argparse
import sys
import time

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Features, lower
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.simulate import simulate


def seconds(num_ranks: int, num_segments: int, num_microbatches: int) -> tuple[int, float]:
    """Return the actions of a plan and the processor seconds that its simulation takes."""
    order = build(
        "aiao",
        num_ranks=num_ranks,
        num_segments=num_segments,
        num_microbatches=num_microbatches,
    )
    choice = Choice.plain("aiao", order.num_segments).changed(step="next")
    plan = lower(order, choice, Features(transfers=False))
    costs = Costs.uniform(plan.num_stages, p2p_s=0.1, p2p_latency_s=0.01, grad_sync_s=30.0)
    start_s = time.process_time()
    simulate(plan, costs, Link(grad_sync_order="edf"))
    return sum(map(len, plan.programs)), time.process_time() - start_s


def main() -> int:
    """Print one row per number of micro-batches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pp", type=int, default=64)
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=(32, 64, 128, 256, 512))
    args = parser.parse_args()
    print("| micro-batches | actions | seconds | µs per action |\n|--:|--:|--:|--:|")
    for microbatches in args.microbatches:
        actions, taken_s = seconds(args.pp, args.segments, microbatches)
        print(f"| {microbatches} | {actions} | {taken_s:.2f} | {taken_s / actions * 1e6:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
