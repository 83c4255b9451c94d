"""How long a plan takes: import, build, lower, verify.

    .venv/bin/python scripts/bench/plan_speed.py [--pp 64] [--segments 4] [--microbatches 1024]

Prints the best of --repeat runs in seconds of this process's own time, so that a busy machine
says nothing about the plan. Goals: under 5 s in all at the default size, under 50 ms to import.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

from megatron.fold3d.plan.compile import lower
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES, build
from megatron.fold3d.plan.verify import verify

IMPORT = """
import time
start = time.process_time()
import megatron.fold3d.plan.files, megatron.fold3d.plan.schedules, megatron.fold3d.plan.verify
print(time.process_time() - start)
"""


def main() -> int:
    """Time each phase of each schedule and print one row per schedule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schedule", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--pp", type=int, default=64)
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()

    print(f"import {best_import_s(args.repeat) * 1e3:.0f} ms")
    print(f"pp={args.pp} segments={args.segments} microbatches={args.microbatches}")
    print(f"{'schedule':<23}{'actions':>9}{'build':>8}{'lower':>8}{'verify':>8}{'total':>8}  s")
    for schedule in args.schedule:
        segments = 1 if schedule in ONE_SEGMENT_SCHEDULES else args.segments
        sizes = (args.pp, segments, args.microbatches)
        runs = [phases(schedule, *sizes) for _ in range(args.repeat)]
        num_actions, *seconds = min(runs, key=lambda run: sum(run[1:]))
        cells = "".join(f"{s:>8.2f}" for s in (*seconds, sum(seconds)))
        print(f"{schedule:<23}{num_actions:>9}{cells}")
    return 0


def phases(
    schedule: str, num_ranks: int, num_segments: int, num_microbatches: int
) -> tuple[int, float, float, float]:
    """Return the number of actions and the seconds to build, lower and verify one plan."""
    compute, build_s = timed(
        lambda: build(
            schedule,
            num_ranks=num_ranks,
            num_segments=num_segments,
            num_microbatches=num_microbatches,
        )
    )
    plan, lower_s = timed(lambda: lower(compute))
    _, verify_s = timed(lambda: verify(plan))
    return sum(map(len, plan.programs)), build_s, lower_s, verify_s


def timed[Result](function: Callable[[], Result]) -> tuple[Result, float]:
    """Return what a call returns and the processor seconds that it took."""
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def best_import_s(repeat: int) -> float:
    """Return the processor seconds that a fresh interpreter takes to import the plan package."""
    command = [sys.executable, "-c", IMPORT]
    runs = (subprocess.run(command, capture_output=True, check=True) for _ in range(repeat))
    return min(float(run.stdout) for run in runs)


if __name__ == "__main__":
    sys.exit(main())
