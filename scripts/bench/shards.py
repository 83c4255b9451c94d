"""Compare parameters and gradients in shards with the distributed optimizer alone, and FSDP2.

    sudo .venv/bin/python -m scripts.bench.shards
    sudo .venv/bin/python -m scripts.bench.shards --rate 400mbit --segments 4

Two pipeline ranks with two replicas each train on a testbed, under AIAO, with layers paced by sleep
and collectives of NCCL's order and volumes. With torch's FSDP2 the same ranks are all replicas of
the whole model, with the same batch. The variants run in turn. The table has the median iteration,
the bytes of an iteration on the busiest link, and the most MB of parameters and of gradients that
a rank holds in an iteration, its optimizer step aside; each also relative to the first row.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from scripts.bench.processes import RealTimeFlag
from scripts.bench.runner import Bench, preload
from scripts.bench.summary import Run
from scripts.bench.testbed import Link, TestbedError, end_on_signals, parse_rate, refuse
from scripts.bench.variants import Job, Variant

_ROOT = Path(__file__).parents[2]
_WARMUP = 3
_RESIDENT = re.compile(r"resident parameters (\d+) of (\d+), gradients (\d+) of (\d+)")
MODES = ("off", "weights", "gradients")


def variants(segments: int) -> Iterator[Variant]:
    """Yield the distributed optimizer alone, then what is compared with it."""
    for mode in MODES:
        flags = f"--schedule aiao --segments {segments} --bf16 --overlap-grad-reduce"
        optimizer = "--use-distributed-optimizer --overlap-param-gather"
        words = f"{flags} {optimizer} --shard-segments {mode}".split()
        yield Variant(f"shards-{mode}", tuple(words))
    fsdp2 = "--pipeline-model-parallel-size 1 --bf16 --use-torch-fsdp2 --ckpt-format torch_dist"
    yield Variant("fsdp2", tuple(fsdp2.split()))


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


def row(run: Run, first: Run, logs: Path) -> str:
    """Return a line of the table; ``first`` is the run without shards."""
    iteration_ms, first_ms = (median(r.times_ms) for r in (run, first))
    held, held_by_first = (
        resident(logs / f"{r.variant.name}-round{r.round}") for r in (run, first)
    )
    cells = (
        run.variant.name,
        f"{iteration_ms:.0f}",
        f"{iteration_ms / first_ms:.3f}",
        f"{run.link_bytes / 1e6:.1f}",
        f"{run.link_bytes / max(1.0, first.link_bytes):.2f}",
        *(f"{now / 1e6:.1f} ({now / f:.0%})" for now, f in zip(held, held_by_first, strict=True)),
    )
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> int:
    """Measure each variant, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit", help="of each link (200mbit)")
    parser.add_argument("--dp", type=int, default=2, help="replicas of a pipeline (2)")
    parser.add_argument("--segments", type=int, default=8, help="per rank (8)")
    parser.add_argument("--layers", type=int, default=16, help="(16)")
    parser.add_argument("--microbatches", type=int, default=8, help="(8)")
    parser.add_argument("--hidden", type=int, default=256, help="(256)")
    parser.add_argument("--forward-ms", type=float, default=6.0, help="of a layer (6)")
    parser.add_argument("--iterations", type=int, default=12, help="of each run (12)")
    parser.add_argument("--rounds", type=int, default=1, help="(1)")
    parser.add_argument("--real-time", action=RealTimeFlag, help="before all other processes")
    parser.add_argument("--logs", type=Path, default=_ROOT / "out/shards", help="(out/shards)")
    args = parser.parse_args(argv)
    end_on_signals()
    try:
        job = Job(
            num_ranks=2,
            data_parallel=args.dp,
            num_microbatches=args.microbatches,
            num_layers=args.layers,
            hidden_size=args.hidden,
            seq_length=32,
            micro_batch_size=1,
            num_iterations=args.iterations,
            clip_grad=1.0,
            recompute=False,
            untied=True,
        )
        if args.iterations <= _WARMUP:
            raise ValueError(f"--iterations {args.iterations}: {_WARMUP} are warm-up; give more")
        pace = ("--forward-ms", str(args.forward_ms), "--backward-ms", str(2 * args.forward_ms))
        bench = Bench(
            job=job,
            link=Link(parse_rate(args.rate)),
            rank_flags=(*pace, "--nccl-order", "--resident"),
            warmup=_WARMUP,
            real_time=args.real_time,
            timeout_s=300.0,
            logs=args.logs,
        )
        preload()
        print(
            "| variant | iteration ms | to the first | MB | to the first | weights | gradients |",
            flush=True,
        )
        print("|---|--:|--:|--:|--:|--:|--:|")
        for number in range(1, args.rounds + 1):
            first: Run | None = None
            for variant in variants(args.segments):
                run = bench.run(variant, number)
                if run.failure:
                    raise ValueError(run.failure)
                first = first or run
                print(row(run, first, args.logs), flush=True)
    except (TestbedError, ValueError) as error:
        return refuse("shards.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
