"""Compare what ranks hold at most under each schedule with what its plan says.

    sudo .venv/bin/python -m scripts.bench.held_table
    sudo .venv/bin/python -m scripts.bench.held_table --recompute --only 1f1b zb-h1

Four pipeline ranks train eight micro-batches on a testbed. `scripts.bench.held` counts.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.bench.runner import Bench, preload
from scripts.bench.testbed import Link, TestbedError, end_on_signals, refuse
from scripts.bench.variants import Job, Variant

_ROOT = Path(__file__).parents[2]
_HELD = re.compile(r"held (\d+) of (\d+) micro-batches, (\d+) of (\d+)")
SCHEDULES = {
    "1f1b": "--schedule 1f1b",
    "zb-h1": "--schedule zb-h1",
    "zb-h2": "--schedule zb-h2",
    "both auto": "--schedule 1f1b:ahead=auto:wgrad=gaps",
    "interleaved": "--schedule interleaved --segments 2",
    "aiao": "--schedule aiao --segments 2",
}


def row(name: str, logs: Path) -> str:
    """Return a line of the table: each rank's micro-batches and KiB, and those of the plan.

    Raises:
        ValueError: a rank has not said what it has held.
    """
    counts, sizes = [], []
    for log in sorted(logs.iterdir()):
        if (match := _HELD.search(log.read_text(errors="replace"))) is None:
            raise ValueError(f"{log} has no line of what was held; did the rank end early?")
        count, most, num_bytes, most_bytes = map(int, match.groups())
        counts.append(f"{count}" if count == most else f"{count} ({most})")
        sizes.append(f"{num_bytes >> 10} ({most_bytes >> 10})")
    return f"| {name} | {' '.join(counts)} | {', '.join(sizes)} |"


def rows(bench: Bench, names: Sequence[str]) -> Iterator[str]:
    """Yield a line per schedule.

    Raises:
        ValueError: a run failed.
    """
    for name in names:
        variant = Variant(name.replace(" ", "-"), tuple(SCHEDULES[name].split()))
        if (run := bench.run(variant, 0)).failure:
            raise ValueError(run.failure)
        yield row(name, bench.logs / f"{variant.name}-round0")


def main(argv: Sequence[str]) -> int:
    """Train under each schedule, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recompute", action="store_true", help="recompute every layer")
    parser.add_argument("--only", nargs="+", default=[*SCHEDULES], choices=SCHEDULES)
    parser.add_argument("--logs", type=Path, default=_ROOT / "out/held", help="(out/held)")
    args = parser.parse_args(argv)
    end_on_signals()
    job = Job(
        num_ranks=4,
        data_parallel=1,
        num_microbatches=8,
        num_layers=8,
        hidden_size=64,
        seq_length=64,
        micro_batch_size=4,
        num_iterations=5,
        clip_grad=1.0,
        recompute=args.recompute,
    )
    bench = Bench(
        job=job,
        link=Link(),
        rank_flags=("--held",),
        warmup=1,
        real_time=False,
        timeout_s=300.0,
        logs=args.logs,
    )
    print("| schedule | micro-batches of ranks 0 to 3 | KiB (of the plan) |\n|---|--:|--:|")
    try:
        preload()
        for line in rows(bench, args.only):
            print(line, flush=True)
    except (TestbedError, ValueError) as error:
        return refuse("held_table.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
