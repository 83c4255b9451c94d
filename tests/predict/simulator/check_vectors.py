"""Compare the simulator with a file of pinned plans: periods, ends of iterations, makespans.

    python -m tests.predict.simulator.check_vectors tests/data/simulator_vectors.json

Prints the largest relative error; exits with 1 if it is above 0.5 %.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.ir import Action, Op, Plan
from megatron.fold3d.plan.passes.grad_sync import serial_grad_sync
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import deferred_grad_sync

LIMIT = 0.005
DP_MODES = ("edf", "fifo", "serial")


def check(case: dict[str, Any]) -> None:
    """Return if a case's lists are as long as its numbers say and its mode is one.

    Raises:
        ValueError: found and rule.
    """
    if case["dp_mode"] not in DP_MODES:
        raise ValueError(f"found dp_mode={case['dp_mode']!r}; it is one of {', '.join(DP_MODES)}")
    ranks, chunks, tasks = case["p"], case["v"], 2 * case["v"] * case["m"]
    lengths = {
        "dp": (case["dp"], ranks),
        "order": (case["order"], ranks),
        "end_of_iteration_rank0": (case["expect"]["end_of_iteration_rank0"], case["iters"]),
        **{f"dp of rank {rank}": (dp, chunks) for rank, dp in enumerate(case["dp"])},
        **{f"order of rank {rank}": (order, tasks) for rank, order in enumerate(case["order"])},
    }
    for name, (found, wanted) in lengths.items():
        if len(found) != wanted:
            numbers = ", ".join(f"{key}={case[key]}" for key in ("p", "v", "m", "iters"))
            raise ValueError(f"found {len(found)} entries in {name}; {numbers} make it {wanted}")


def run(case: dict[str, Any]) -> Timeline:
    """Simulate one case of the file."""
    check(case)
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
        Link(grad_sync_order="edf" if case["dp_mode"] == "edf" else "fifo"),
        iterations=case["iters"],
    )


def error(case: dict[str, Any]) -> float:
    """Return the largest relative error of one case."""
    timeline, expected = run(case), case["expect"]
    pairs: list[tuple[float, float]] = [
        (timeline.period_s, expected["period"]),
        (timeline.makespan_s, expected["makespan"]),
        *zip(timeline.iteration_ends_s(0), expected["end_of_iteration_rank0"], strict=True),
    ]
    if not all(wanted > 0 for _, wanted in pairs):
        raise ValueError(f"found expect={expected}; times are above zero")
    return max(abs(found - wanted) / wanted for found, wanted in pairs)


def errors_of(path: Path) -> dict[Any, float]:
    """Return the largest relative error of each case of a file.

    Raises:
        ValueError: the file has no cases, or one of them is none.
    """
    found = json.loads(path.read_text())
    cases = found.get("cases") if isinstance(found, dict) else None
    if not isinstance(cases, list) or not cases:
        raise ValueError('no list of plans under "cases"')
    errors = {}
    for index, case in enumerate(cases):
        try:
            errors[case.get("id", index)] = error(case)
        except KeyError as key:
            raise ValueError(f"case {index} lacks {key}") from None
        except (AttributeError, TypeError, ValueError) as cause:
            raise ValueError(f"case {index}: {cause}") from None
    return errors


def main() -> int:
    """Check the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="plans and what to expect of them, JSON")
    arguments = parser.parse_args()
    try:
        errors = errors_of(arguments.file)
    except (OSError, ValueError) as found:
        parser.error(f"{arguments.file} is no file of cases: {found}")
    worst = max(errors.values())
    lines = [f"case {number:>3}  {value:.2e}" for number, value in errors.items()]
    lines.append(f"{len(errors)} cases, largest relative error {worst:.2e}, limit {LIMIT}")
    sys.stdout.write("\n".join(lines) + "\n")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
