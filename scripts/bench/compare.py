"""Compare schedules by their iteration times on slow links, in turn: A B C A B C.

    sudo .venv/bin/python -m scripts.bench.compare --pp 2 --dp 2 --rate 200mbit
        --only 'stock-v8*' 'aiao-s8*' --rounds 3

Every variant trains the same model on the same data with `scripts.bench.rank`, one rank per host
of a testbed. Each runs once with links that are not shaped, which is its compute time, pipeline
bubble included; the bytes it puts on the busiest link, at the link's rate, are its communication
time. The larger of the two is the lower bound that the table compares with.

``--variants FILE`` adds variants to the known ones: a TOML file with a ``name = "flags"`` each.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megatron.fold3d.observe import training_log
from scripts.bench import summary, variants
from scripts.bench.options import parser_of
from scripts.bench.processes import check_real_time
from scripts.bench.runner import Bench, paced, preload
from scripts.bench.summary import Run
from scripts.bench.testbed import Link, TestbedError, end_on_signals, parse_rate, refuse
from scripts.bench.variants import Job, Variant

_ROOT = Path(__file__).parents[2]


def compare(
    bench: Bench, chosen: Sequence[Variant], num_rounds: int, keep: int | None
) -> list[Run]:
    """Run all variants in turn, and say how it goes."""
    runs: list[Run] = []
    for number in range(num_rounds + 1):
        if number == 2 and keep is not None:
            chosen = kept(chosen, runs, keep)
        for position, variant in enumerate(chosen, 1):
            run = bench.run(variant, number)
            runs.append(run)
            where = f"round {number}" if number else "unshaped"
            what = run.failure
            if not what:
                spread = training_log.Spread.of(run.times_ms)
                what = f"{spread} ms; others use {run.other_cpus:.1f} CPUs"
            say(f"{where}/{num_rounds} {position}/{len(chosen)} {variant.name}: {what}")
        failed = {run.variant for run in runs if run.failure}
        chosen = [variant for variant in chosen if variant not in failed]
    return runs


def kept(chosen: Sequence[Variant], runs: Sequence[Run], keep: int) -> list[Variant]:
    """The default, the ``keep`` fastest other stock variants of round 1, and all of ours."""
    first = summary.rows([run for run in runs if run.round < 2], None)
    sweep = [row for row in first if row.variant.is_stock and row.variant != variants.DEFAULT]
    sweep.sort(key=lambda row: row.spread.median_ms)
    dropped = {row.variant for row in sweep[keep:]}
    return [variant for variant in chosen if variant not in dropped]


def say(line: str) -> None:
    """Tell whoever waits how it goes."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _conditions(args: argparse.Namespace, runs: Sequence[Run]) -> str:
    """What must stand beside the table for its numbers to mean anything."""
    cpus = sorted(run.other_cpus for run in runs if not run.failure)
    load = f"{cpus[len(cpus) // 2]:.1f} (most {cpus[-1]:.1f})" if cpus else "unknown"
    priority = "before all other processes" if args.real_time else "as any process"
    delay = f" with {args.delay_ms:g} ms delay" if args.delay_ms else ""
    recompute = "full" if args.recompute else "no"
    embeddings = "untied" if args.untied else "tied"
    timed = args.iterations - args.warmup
    return f"""\
- {time.strftime("%Y-%m-%d")}, {_cpu_model()}, {os.cpu_count()} cores; \
other processes kept {load} of them busy. Ranks are scheduled {priority}.
- pp={args.pp} x dp={args.dp} x tp={args.tp}, one rank per host, links of {args.rate} each \
way{delay}, with queues of {args.queue_ms:g} ms; \
{args.layers} layers of hidden size {args.hidden}, sequence {args.seq_length}, \
{args.microbatches} micro-batches of {args.micro_batch_size}, {args.precision}, \
clip-grad {args.clip_grad:g}, {recompute} recompute, {embeddings} embeddings.
- {_paces(args)}
- {args.rounds} rounds in turn, {timed} timed iterations each after {args.warmup}. Names with -do: \
distributed optimizer. Bold: strongest stock. Compute: the same with links that are not shaped. \
Link: what crosses the busiest link, at its rate."""


def _paces(args: argparse.Namespace) -> str:
    if args.half_ms:
        return f"Each half of a layer sleeps {args.half_ms:g} ms forward; collectives are gloo's."
    return (
        f"Layers: paced by sleep, {args.forward_ms:g} ms forward, {args.backward_ms:g} ms backward "
        "each. Collectives: gloo's, run one at a time per group in order of issue, reduce-scatter "
        "and all-gather in rings of true volume."
    )


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    variants.add_job_options(parser.add_argument_group("the job"), Job())
    links = parser.add_argument_group("the testbed")
    links.add_argument("--rate", default="200mbit", help="of each link, or unshaped (200mbit)")
    links.add_argument("--delay-ms", type=float, default=0.0, help="one way, on each link (0)")
    links.add_argument(
        "--queue-ms", type=float, default=2.0, help="packets that would wait longer are lost (2)"
    )
    links.add_argument("--forward-ms", type=float, default=6.0, help="of a paced layer (6)")
    links.add_argument("--backward-ms", type=float, default=12.0, help="of a paced layer (12)")
    links.add_argument("--half-ms", type=float, help="of half a layer's forward, in place of both")
    links.add_argument(
        "--real-time",
        action="store_true",
        help="ranks that train go before all other processes, for a machine that is not idle",
    )
    what = parser.add_argument_group("what is compared")
    what.add_argument("--variants", type=Path, metavar="FILE", help="TOML with more variants")
    what.add_argument(
        "--only", nargs="+", default=["*"], metavar="NAME", help="variants by name; * matches all"
    )
    what.add_argument(
        "--distributed-optimizer",
        choices=("both", "on", "off"),
        default="both",
        help="variants with it, without it, or both (both)",
    )
    what.add_argument(
        "--checkout",
        type=Path,
        metavar="DIR",
        help="run ours once more with the code in this folder, which has its own .venv",
    )
    what.add_argument("--list", action="store_true", help="list the variants and end")
    what.add_argument("--rounds", type=int, default=3, help="(3)")
    what.add_argument(
        "--keep", type=int, help="after round 1 go on with this many stock variants, the fastest"
    )
    what.add_argument("--warmup", type=int, default=4, help="iterations left out (4)")
    what.add_argument("--timeout-s", type=float, default=600.0, help="of each run (600)")
    what.add_argument("--logs", type=Path, default=_ROOT / "out/bench", help="(out/bench)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Compare, and print the table; 1 if a variant failed or its losses differ."""
    args = parse_arguments(argv)
    end_on_signals()
    try:
        if args.rounds < 1 or not 0 < args.warmup < args.iterations:
            raise ValueError(
                f"{args.rounds} rounds of {args.iterations} iterations, {args.warmup} left out: "
                "nothing to time; need a round, and more iterations than are left out"
            )
        if args.real_time:
            check_real_time("--real-time")
        bench, chosen = _read(args)
        if args.list:
            print("\n".join(f"{v.name:24} {' '.join(v.flags)}" for v in chosen))
            return 0
        preload()
        runs = compare(bench, chosen, args.rounds, args.keep)
    except (TestbedError, ValueError) as error:
        return refuse("compare.py", error)
    found = summary.rows(runs, parse_rate(args.rate))
    largest, differing = summary.loss_disagreements(runs, bench.job.loss_tolerance)
    failures = [f"{run.variant.name}: {run.failure}" for run in runs if run.failure]
    print(f"{_conditions(args, runs)}\n\n{summary.table(found)}\n")
    print(f"Losses of {len(runs) - len(failures)} runs agree to {largest:.1e}.")
    for problem in differing + failures:
        print(f"compare.py: {problem}", file=sys.stderr)
    return 1 if differing or failures else 0


def _read(args: argparse.Namespace) -> tuple[Bench, list[Variant]]:
    job = variants.job_of(args, Job())
    halves = ("--half-ms", str(args.half_ms))
    bench = Bench(
        job=job,
        link=Link(parse_rate(args.rate), args.delay_ms, queue_ms=args.queue_ms),
        rank_flags=halves if args.half_ms else paced(args.forward_ms, args.backward_ms),
        warmup=args.warmup,
        real_time=args.real_time,
        timeout_s=args.timeout_s,
        logs=args.logs,
    )
    every = [*variants.known(job), *(variants.read(args.variants) if args.variants else ())]
    wanted = {"both": None, "on": True, "off": False}[args.distributed_optimizer]
    chosen = variants.choose(every, args.only, wanted)
    if args.checkout is None:
        return bench, chosen
    checkout = args.checkout.resolve()
    if not (checkout / ".venv/bin/python").is_file():
        raise ValueError(f"--checkout {checkout}: found no .venv/bin/python there; make it there")
    before = [replace(v, name=f"{v.name}@{checkout.name}", checkout=checkout) for v in chosen]
    return bench, [*chosen, *(variant for variant in before if not variant.is_stock)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
