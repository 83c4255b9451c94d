"""Train a small GPT on slow links three times over, and show what FOLD3D gains.

    make demo
    make demo ARGS="--picture docs/images/demo.svg"      # the picture of the README

Real Megatron and real TCP: four ranks, two pipelines of two, each rank on a host of its own: a
network namespace with a slow link. Stock's default, the strongest stock and ``--schedule auto``
train the same model on the same data in turn, round by round. Their losses must be equal.

Layers are paced: what a forward or backward does not need of its time is slept, because four ranks
share the few cores of this machine. Everything else is as fast as it is.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from megatron.fold3d.commands import compare
from megatron.fold3d.commands.compare import ARMS
from megatron.fold3d.commands.console import lettered
from megatron.fold3d.observe.runs import Run as Training
from megatron.fold3d.observe.runs import compare_losses, read_run, speed_ratios
from megatron.fold3d.observe.training_log import Spread
from scripts.bench.runner import Bench, paced, preload
from scripts.bench.summary import Run
from scripts.bench.testbed import Link, Testbed, TestbedError, become_root, end_on_signals, refuse
from scripts.bench.variants import Job, Variant
from scripts.paper.systems import SYSTEMS, Layout

ROOT = Path(__file__).parents[1]
LINK = Link(90e6)
FORWARD_MS, BACKWARD_MS = 24, 48
JOB = Job(num_microbatches=2, precision="bf16-grads")
TRACED = 3  # iterations, the last ones of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One of the runs that are compared.

    Attributes:
        title: in tables and pictures.
        warmup: iterations until its time counts.
    """

    name: str
    title: str
    flags: tuple[str, ...] = ()
    warmup: int = 2


def arms(job: Job) -> tuple[Arm, ...]:
    """Stock's default, the strongest of stock that a sweep of this job found, and ours."""
    segments = job.segment_counts[-1]
    layout = Layout(
        pipeline_ranks=job.num_ranks, segments=segments, microbatches=job.num_microbatches
    )
    strongest = (*SYSTEMS["megatron-best"].words(layout), "--no-align-grad-reduce")
    auto = (
        *("--schedule", "auto", "--segments", str(segments)),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    )
    titles = lettered(("stock's default", ARMS["stock-same-layout"], ARMS["auto"]))
    return (
        Arm(name="default", title=titles[0]),
        Arm(name="strongest", title=titles[1], flags=strongest),
        # It searches beside two cores' ranks for eight iterations, and nine are its trials.
        Arm(name="auto", title=titles[2], flags=auto, warmup=18),
    )


def main(argv: Sequence[str], job: Job = JOB) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="(2)")
    parser.add_argument("--timed", type=int, default=5, metavar="N", help="iterations of a run (5)")
    parser.add_argument("--output", type=Path, default=ROOT / "out/demo", metavar="DIR")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="(DIR/timelines.svg)")
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.timed < TRACED:
        parser.error(f"--rounds is at least 1, and --timed at least {TRACED}")
    end_on_signals()
    started_s = time.monotonic()
    link: Link | None = LINK
    try:
        become_root("scripts.demo", argv)
        with Testbed(1, LINK):
            pass
    except TestbedError as error:
        print(f"Without slow links, so no times are compared: {error}", flush=True)
        link, args.rounds = None, 1
    print(conditions(job, link), flush=True)
    preload()
    try:
        runs = train(job, link, args)
    except ValueError as error:
        return refuse("make demo", error)
    ratios = speed_ratios(runs) if link else ()
    picture, page = args.picture or args.output / "timelines.svg", args.output / "demo.html"
    picture.write_bytes(compare.timelines_svg(runs, ratios))
    page.write_text(compare.timelines_page(runs, ratios), encoding="utf-8")
    print()
    print("\n".join(compare.time_lines(runs)), end="\n\n")
    if ratios:
        print("\n".join(compare.speed_lines(runs, ratios)))
    same_layout = runs[1:]  # other layouts add up the norm, and so clip, in another order
    print(f"B and C, {compare.loss_line(same_layout)}")
    print(f"\npicture  {picture}\npage     {page}\nDone in {time.monotonic() - started_s:.0f} s.")
    agreement = compare_losses(same_layout)
    return 0 if agreement.equal == agreement.common else 1


def conditions(job: Job, link: Link | None) -> str:
    """What must stand beside the numbers for them to mean anything."""
    links = f"links of {link.rate_bit_s / 1e6:.0f} Mb/s" if link and link.rate_bit_s else "loopback"
    return (
        f"Real Megatron, {job.world_size} ranks on {links}, "
        f"{job.data_parallel} pipelines of {job.num_ranks}. {job.num_layers} layers of hidden size "
        f"{job.hidden_size}, sequence {job.seq_length},\n"
        f"{job.num_microbatches} micro-batches of {job.micro_batch_size} for each pipeline, bf16, "
        f"clipping. A layer lasts at least {FORWARD_MS} ms\n"
        f"forward and {BACKWARD_MS} ms backward: what the CPU does not need of them is slept.\n"
        "A: stock's default. B: stock's fastest flags. C: --schedule auto. All in turn.\n"
    )


def train(job: Job, link: Link | None, args: argparse.Namespace) -> tuple[Training, ...]:
    """Run all arms in turn, and say how it goes.

    Raises:
        ValueError: a run failed.
    """
    rounds: dict[Arm, list[Run]] = {arm: [] for arm in arms(job)}
    total = args.rounds * sum(arm.warmup + args.timed for arm in rounds)
    with tqdm(total=total, unit="iteration", disable=None, leave=False) as bar:
        for number in range(1, args.rounds + 1):
            for arm in rounds:
                traced = f"{arm.warmup + 1 + args.timed - TRACED}-{arm.warmup + args.timed}"
                trace = ("--trace", str(args.output / arm.name), "--trace-iterations", traced)
                bench = Bench(
                    job=replace(job, num_iterations=arm.warmup + args.timed),
                    link=link,
                    rank_flags=paced(FORWARD_MS, BACKWARD_MS),
                    warmup=arm.warmup,
                    logs=args.output / "logs",
                )
                where = f"round {number} of {args.rounds}  {arm.title}"
                bar.set_description(where)

                def show(done: int, before: int = bar.n) -> None:
                    bar.update(before + done - bar.n)

                run = bench.measured(Variant(arm.name, (*arm.flags, *trace)), number, show)
                tqdm.write(f"{where:<36} {Spread.of(run.times_ms)} ms")
                sys.stdout.flush()
                rounds[arm].append(run)
    return tuple(
        replace(
            read_run(args.output / arm.name, arm.title, max(run.warmup for run in runs)),
            rounds=tuple(run.iterations for run in runs),
        )
        for arm, runs in rounds.items()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
