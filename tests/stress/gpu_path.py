"""Run the GPU path on a late device: every case, every seeded fault, then many random delays.

The first table has a line for each mode, run with one hardware queue and with many. A schedule of
delays is one training iteration, each with random delays of its own.

    .venv/bin/python -m tests.stress.gpu_path --seconds 600

Prints one line per run. Exits with 1 if a run differs from stock's, or if a fault does not show.
"""

import random
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from dataclasses import replace
from itertools import count, product

from tests.gpu_path.cases import CASES, Case, found_by, found_without, wrong
from tests.gpu_path.late_device import Delays
from tests.gpu_path.late_training import Late
from tests.gpu_path.mutations import MUTATIONS, Mutation
from tests.stress.program import until

ONE_QUEUE, MANY = 1, 64
QUEUES = (ONE_QUEUE, 8, MANY)
DELAYS = ((0.1, 0.02), (0.3, 0.004), (0.8, 0.002))  # the share of late items, the longest in s
TRIES = 3  # to show a fault
ITERATIONS = 25  # per run, each with delays of its own


def main() -> int:
    """Run the faults, then schedules of delays until the time is up; returns the exit code."""
    parser = ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="time for schedules of delays")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule of delays")
    parser.add_argument("--runs", type=int, help=f"stop after so many, of {ITERATIONS} schedules")
    parser.add_argument("--no-table", action="store_true", help="leave the table of modes out")
    parser.add_argument("--no-faults", action="store_true", help="leave the faults out")
    parser.add_argument("--first-fault", type=int, default=0, help="leave those before it out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        faults = () if args.no_faults else MUTATIONS[args.first_fault :]
        failures = 0 if args.no_table else _table(folder)
        missed = [fault for fault in faults if not _shows(fault, folder)]
        failures += _schedules(args.seed, args.seconds, args.runs, folder)
    for mutation in missed:
        print(f"MISSED {mutation}")
    return 1 if missed or failures else 0


def _table(folder: str) -> int:
    """Run every mode with one hardware queue and with many; returns how many runs differ."""
    failures = 0
    for case in CASES:
        said = []
        for num_queues in (ONE_QUEUE, MANY):
            if num_queues == ONE_QUEUE and not case.allows_one_queue:
                said.append("refused")
                continue
            found = wrong(case, Late(num_queues=num_queues), folder)
            said.append(f"DIFFERS: {_brief(found)}" if found else "equal")
            failures += bool(found)
        print(f"{case}: one queue {said[0]}, {MANY} queues {said[1]}", flush=True)
    return failures


def _shows(mutation: Mutation, folder: str) -> bool:
    """Run with a fault, after a run without it that must be equal to stock's."""
    if differs := found_without(mutation, folder):
        print(f"DIFFERS without a fault: {_brief(differs)}", flush=True)
        return False
    # What is late starts after a while even if nobody waits for it: too early on a busy machine.
    found = next(filter(None, (found_by(mutation, folder) for _ in range(TRIES))), [])
    print(f"fault {'shows' if found else 'MISSED'}: {mutation}: {_brief(found)}", flush=True)
    return bool(found)


def _schedules(seed: int, seconds: float, at_most: int | None, folder: str) -> int:
    failures = 0
    done: Counter[str] = Counter()
    numbers = count() if at_most is None else range(at_most)
    for number in until(time.monotonic() + seconds, numbers):
        case, late = _draw(seed + number)
        found = wrong(case, late, folder)
        failures += bool(found)
        done[str(case)] += ITERATIONS
        said = f"DIFFERS: {_brief(found)}" if found else "equal"
        print(f"seed {seed + number}, {late.num_queues} queues, {case}: {said}", flush=True)
    counts = ", ".join(f"{name} {times}" for name, times in done.items())
    print(f"{done.total()} schedules of delays, {failures} differ: {counts}", flush=True)
    return failures


def _draw(seed: int) -> tuple[Case, Late]:
    """Return one of all runs; consecutive seeds have each once."""
    every = product(CASES, QUEUES, (False, True), DELAYS)
    runs = [run for run in every if run[1] > ONE_QUEUE or run[0].allows_one_queue]
    random.Random(0).shuffle(runs)
    case, num_queues, keeps_tensors, (share, longest_s) = runs[seed % len(runs)]
    return replace(case, iterations=ITERATIONS), Late(
        delays=Delays(seed=seed, share=share, longest_s=longest_s),
        num_queues=num_queues,
        keeps_tensors=keeps_tensors,
    )


def _brief(found: list[str]) -> str:
    lines = [line for text in found[:1] for line in text.splitlines() if "Error" in line]
    return f"{len(found)} values" if len(found) > 1 else (lines or found or [""])[-1][:150]


if __name__ == "__main__":
    sys.exit(main())
