"""Compare the simulator with a file of pinned plans: periods, ends of iterations, makespans.

    python scripts/bench/check_vectors.py tests/data/simulator_vectors.json

Prints the largest relative error; exits with 1 if it is above 0.5 %.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megatron.fold3d.analysis.costs import Costs
from megatron.fold3d.analysis.grad_sync import deferred_grad_sync, serial_grad_sync
from megatron.fold3d.analysis.simulate import simulate
from megatron.fold3d.analysis.timeline import Timeline
from megatron.fold3d.plan.ir import Action, Op, Plan

LIMIT = 0.005


def run(case: dict[str, Any]) -> Timeline:
    """Simulate one case of the file."""
    ranks, segments = case["p"], range(case["v"])
    plan = Plan(
        tuple(
            tuple(Action(chunk * ranks + rank, Op(op), m) for op, m, chunk in order)
            for rank, order in enumerate(case["order"])
        )
    )
    costs = Costs(
        forward_s=tuple(case["dur_f"]),
        backward_s=tuple(case["dur_b"]),
        p2p_s=case["x"],
        p2p_latency_s=case["lat"],
        grad_sync_s=tuple(case["dp"][rank][s] for s in segments for rank in range(ranks)),
    )
    serial = case["dp_mode"] == "serial"
    return simulate(
        serial_grad_sync(plan) if serial else deferred_grad_sync(plan),
        costs,
        iterations=case["iters"],
        grad_sync_order="edf" if case["dp_mode"] == "edf" else "fifo",
        flush=serial,
    )


def error(case: dict[str, Any]) -> float:
    """Return the largest relative error of one case."""
    timeline, expected = run(case), case["expect"]
    pairs: list[tuple[float, float]] = [
        (timeline.period_s, expected["period"]),
        (timeline.makespan_s, expected["makespan"]),
        *zip(timeline.iteration_ends_s(0), expected["end_of_iteration_rank0"], strict=True),
    ]
    return max(abs(found - wanted) / wanted for found, wanted in pairs)


def main() -> int:
    """Check the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="plans and what to expect of them, JSON")
    arguments = parser.parse_args()
    try:
        cases = json.loads(arguments.file.read_text())["cases"]
        errors = {case.get("id", index): error(case) for index, case in enumerate(cases)}
    except (KeyError, OSError, TypeError, ValueError) as found:
        parser.error(f"{arguments.file} is no file of cases: {found!r}")
    for number, value in errors.items():
        print(f"case {number:>3}  {value:.2e}")
    worst = max(errors.values())
    print(f"{len(errors)} cases, largest relative error {worst:.2e}, limit {LIMIT}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
