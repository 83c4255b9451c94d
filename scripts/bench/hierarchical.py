"""Compare sums inside nodes with one ring over all replicas, two ranks to a host.

    sudo .venv/bin/python -m scripts.bench.hierarchical
    sudo .venv/bin/python -m scripts.bench.hierarchical --pp 2 --rate 400mbit

Four replicas train on two hosts of a testbed, or with ``--pp 2`` those of each pipeline rank on two
of four hosts. Ranks of a host reach each other over its loopback, which is not shaped. Layers are
paced by sleep, and collectives have NCCL's order and volumes. The variants run in turn; the table
has the median iteration, and the bytes of an iteration on the busiest link.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from scripts.bench.runner import Bench, preload
from scripts.bench.summary import Run
from scripts.bench.testbed import Link, TestbedError, end_on_signals, parse_rate, refuse
from scripts.bench.variants import Job, Variant

_ROOT = Path(__file__).parents[2]
_WARMUP = 3
_RANKS_PER_HOST = 2
_INSIDE = "--hierarchical-dp-sync auto"
_SHARE = "--backward-share auto"
_OPTIMIZER = "--use-distributed-optimizer --overlap-param-gather"


def variants(segments: int) -> Iterator[Variant]:
    """Yield one ring, what sums inside nodes first, and the distributed optimizer."""
    aiao = f"--schedule aiao --segments {segments} --bf16 --overlap-grad-reduce"
    for name, flags in {
        "ring": "",
        "nodes": _INSIDE,
        "ring-auto": _SHARE,
        "nodes-auto": f"{_SHARE} {_INSIDE}",
        "distributed": _OPTIMIZER,
    }.items():
        yield Variant(name, tuple(f"{aiao} {flags}".split()))


def row(run: Run, first: Run) -> str:
    """Return a line of the table; ``first`` is the run with one ring."""
    iteration_ms, first_ms = (median(r.times_ms) for r in (run, first))
    cells = (
        run.variant.name,
        f"{iteration_ms:.0f}",
        f"{iteration_ms / first_ms:.3f}",
        f"{run.link_bytes / 1e6:.1f}",
        f"{run.link_bytes / max(1.0, first.link_bytes):.2f}",
    )
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> int:
    """Measure each variant, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit", help="of each link (200mbit)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline ranks (1)")
    parser.add_argument("--segments", type=int, help="per rank (4, or 1 without a pipeline)")
    parser.add_argument("--layers", type=int, help="(8 per pipeline rank)")
    parser.add_argument("--microbatches", type=int, default=8, help="(8)")
    parser.add_argument("--hidden", type=int, default=256, help="(256)")
    parser.add_argument("--forward-ms", type=float, default=6.0, help="of a layer (6)")
    parser.add_argument("--iterations", type=int, default=12, help="of each run (12)")
    parser.add_argument("--rounds", type=int, default=1, help="(1)")
    parser.add_argument("--only", nargs="*", help="variants, after the first")
    parser.add_argument("--real-time", action="store_true", help="before all other processes")
    parser.add_argument(
        "--logs", type=Path, default=_ROOT / "out/hierarchical", help="(out/hierarchical)"
    )
    args = parser.parse_args(argv)
    end_on_signals()
    try:
        job = Job(
            num_ranks=args.pp,
            data_parallel=4,
            num_microbatches=args.microbatches,
            num_layers=args.layers or 8 * args.pp,
            hidden_size=args.hidden,
            seq_length=32,
            micro_batch_size=1,
            num_iterations=args.iterations,
            clip_grad=0.0,
            recompute=False,
            untied=True,
        )
        if args.iterations <= _WARMUP:
            raise ValueError(f"--iterations {args.iterations}: {_WARMUP} are warm-up; give more")
        ring, *others = variants(args.segments or (4 if args.pp > 1 else 1))
        if unknown := set(args.only or ()) - {other.name for other in others}:
            names = ", ".join(other.name for other in others)
            raise ValueError(f"--only {min(unknown)}: it is one of {names}")
        chosen = [other for other in others if args.only is None or other.name in args.only]
        pace = ("--forward-ms", str(args.forward_ms), "--backward-ms", str(2 * args.forward_ms))
        bench = Bench(
            job=job,
            link=Link(parse_rate(args.rate)),
            rank_flags=(*pace, "--nccl-order"),
            warmup=_WARMUP,
            real_time=args.real_time,
            timeout_s=300.0,
            logs=args.logs,
            ranks_per_host=_RANKS_PER_HOST,
        )
        preload()
        print("| variant | iteration ms | to the first | MB | to the first |", flush=True)
        print("|---|--:|--:|--:|--:|")
        for number in range(1, args.rounds + 1):
            first: Run | None = None
            for variant in (ring, *chosen):
                run = bench.run(variant, number)
                if run.failure:
                    raise ValueError(run.failure)
                first = first or run
                print(row(run, first), flush=True)
    except (TestbedError, ValueError) as error:
        return refuse("hierarchical.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
