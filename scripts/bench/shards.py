"""Compare parameters and gradients in shards with the distributed optimizer alone.

    sudo .venv/bin/python -m scripts.bench.shards
    sudo .venv/bin/python -m scripts.bench.shards --rate 400mbit --segments 4

Two pipeline ranks with two replicas each train on a testbed, under AIAO, with layers paced by sleep
and collectives of NCCL's order and volumes. The variants run in turn. The table has the median
iteration, the bytes of an iteration on the busiest link, and the most MB of parameters and of
gradients that a rank holds in an iteration, its optimizer step aside; each also relative to the
first row.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from scripts.bench.processes import RealTimeFlag
from scripts.bench.runner import Bench, paced
from scripts.bench.summary import Run
from scripts.bench.tables import parser_of, print_table
from scripts.bench.testbed import Link, parse_rate
from scripts.bench.variants import Job, Variant, add_job_options, job_of

_WARMUP = 3
JOB = Job(untied=True)
_RESIDENT = re.compile(r"resident parameters (\d+) of (\d+), gradients (\d+) of (\d+)")
MODES = ("off", "weights", "gradients")


def variants(segments: int) -> Iterator[Variant]:
    """Yield the distributed optimizer alone, then what is compared with it."""
    for mode in MODES:
        flags = f"--schedule aiao --segments {segments} --bf16 --overlap-grad-reduce"
        optimizer = "--use-distributed-optimizer --overlap-param-gather"
        words = f"{flags} {optimizer} --shard-segments {mode}".split()
        yield Variant(f"shards-{mode}", tuple(words))


def resident(logs: Path) -> tuple[int, int]:
    """Return the most bytes of parameters, and of gradients, that a rank has held.

    Raises:
        ValueError: a rank has not said so.
    """
    held = []
    for log in sorted(logs.iterdir()):
        if (match := _RESIDENT.search(log.read_text(errors="replace"))) is None:
            raise ValueError(f"{log} has no line of what was resident; did the rank end early?")
        held.append((int(match[1]), int(match[3])))
    parameters, gradients = map(max, zip(*held, strict=True))
    return parameters, gradients


def row(run: Run, first: Run, logs: Path) -> Sequence[str]:
    """Return a line of the table; ``first`` is the run without shards."""
    iteration_ms, first_ms = (median(r.times_ms) for r in (run, first))
    held, held_by_first = (
        resident(logs / f"{r.variant.name}-round{r.round}") for r in (run, first)
    )
    return (
        run.variant.name,
        f"{iteration_ms:.0f}",
        f"{iteration_ms / first_ms:.3f}",
        f"{run.link_bytes / 1e6:.1f}",
        f"{run.link_bytes / max(1.0, first.link_bytes):.2f}",
        *(f"{now / 1e6:.1f} ({now / f:.0%})" for now, f in zip(held, held_by_first, strict=True)),
    )


def main(argv: Sequence[str]) -> int:
    """Measure each variant, and print a table."""
    parser = parser_of(__doc__, logs="shards")
    parser.add_argument("--rate", default="200mbit", help="of each link (200mbit)")
    add_job_options(parser, JOB, ("dp", "layers", "microbatches", "hidden", "iterations"))
    parser.add_argument("--segments", type=int, default=8, help="per rank (8)")
    parser.add_argument("--forward-ms", type=float, default=6.0, help="of a layer (6)")
    parser.add_argument("--rounds", type=int, default=1, help="(1)")
    parser.add_argument("--real-time", action=RealTimeFlag, help="before all other processes")
    args = parser.parse_args(argv)
    if args.iterations <= _WARMUP:
        parser.error(f"--iterations {args.iterations}: {_WARMUP} are warm-up; give more")
    titles = ("variant", "iteration ms", "to the first", "MB", "to the first")
    return print_table("shards.py", (*titles, "weights", "gradients"), rows(args))


def rows(args: argparse.Namespace) -> Iterator[Sequence[str]]:
    """Yield a line for each run, in turn."""
    bench = Bench(
        job=job_of(args, JOB),
        link=Link(parse_rate(args.rate)),
        rank_flags=(*paced(args.forward_ms, 2 * args.forward_ms), "--resident"),
        warmup=_WARMUP,
        real_time=args.real_time,
        logs=args.logs,
    )
    for number in range(1, args.rounds + 1):
        first: Run | None = None
        for variant in variants(args.segments):
            run = bench.measured(variant, number)
            first = first or run
            yield row(run, first, args.logs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
