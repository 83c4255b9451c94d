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

from megatron.fold3d.commands import compare
from megatron.fold3d.observe.runs import Comparison, compare_losses, read_run
from megatron.fold3d.observe.runs import Run as Training
from megatron.fold3d.observe.training_log import Spread
from scripts.bench.runner import Bench, paced, preload
from scripts.bench.summary import Run
from scripts.bench.testbed import Link, Testbed, TestbedError, become_root, end_on_signals, refuse
from scripts.bench.variants import Job, Variant

ROOT = Path(__file__).parents[1]
LINK = Link(180e6)
FORWARD_MS, BACKWARD_MS = 24, 48
JOB = Job(
    num_microbatches=2,
    clip_grad=0.0,
)
TRACED = 3  # iterations, the last ones of a run
START_S = 7.0  # until the first iteration; a guess, as the arms' iterations are


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One of the runs that are compared.

    Attributes:
        name: of its folder.
        title: in tables and pictures.
        flags: added to the job's.
        warmup: iterations until its time counts.
        iteration_s: a guess, for the time that is left.
    """

    name: str
    title: str
    flags: tuple[str, ...]
    warmup: int
    iteration_s: float


def arms(job: Job) -> tuple[Arm, ...]:
    """Stock's default, the strongest of stock that a sweep of this job found, and ours."""
    segments, group = str(job.segment_counts[-1]), str(job.num_microbatches)
    strongest = (
        *("--num-virtual-stages-per-pipeline-rank", segments),
        *("--microbatch-group-size-per-virtual-pipeline-stage", group),
        "--overlap-p2p-communication-warmup-flush",
        *("--overlap-grad-reduce", "--no-align-grad-reduce"),
        *("--use-distributed-optimizer", "--overlap-param-gather"),
    )
    auto = ("--schedule", "auto", "--segments", segments, "--overlap-grad-reduce")
    return (
        Arm(name="default", title="A stock's default", flags=(), warmup=2, iteration_s=2.9),
        Arm(
            name="strongest",
            title="B stock, same layout",
            flags=strongest,
            warmup=2,
            iteration_s=1.8,
        ),
        Arm(
            name="auto",
            title="C auto",
            flags=auto,
            warmup=18,  # it searches beside two cores' ranks for eight, and nine are its trials
            iteration_s=1.7,
        ),
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
    compared = Comparison(runs) if link else None
    picture, page = args.picture or args.output / "timelines.svg", args.output / "demo.html"
    picture.write_bytes(compare.timelines_svg(runs, compared))
    page.write_text(compare.timelines_page(runs, compared), encoding="utf-8")
    print()
    print("\n".join(compare.time_lines(runs)), end="\n\n")
    if compared:
        print("\n".join(compare.speed_lines(compared)))
    print(compare.loss_line(runs))
    print(f"\npicture  {picture}\npage     {page}\nDone in {time.monotonic() - started_s:.0f} s.")
    agreement = compare_losses(runs)
    return 0 if agreement.equal == agreement.common else 1


def conditions(job: Job, link: Link | None) -> str:
    """What must stand beside the numbers for them to mean anything."""
    links = f"links of {link.rate_bit_s / 1e6:.0f} Mb/s" if link and link.rate_bit_s else "loopback"
    return (
        f"Real Megatron, {job.world_size} ranks on {links}, "
        f"{job.data_parallel} pipelines of {job.num_ranks}. {job.num_layers} layers of hidden size "
        f"{job.hidden_size}, sequence {job.seq_length},\n"
        f"{job.num_microbatches} micro-batches of {job.micro_batch_size} for each pipeline, fp32, "
        f"no clipping. A layer lasts at least {FORWARD_MS} ms\n"
        f"forward and {BACKWARD_MS} ms backward: what the CPU does not need of them is slept.\n"
        "A: stock's default. B: stock's fastest flags. C: --schedule auto. All in turn.\n"
    )


def train(job: Job, link: Link | None, args: argparse.Namespace) -> tuple[Training, ...]:
    """Run all arms in turn, and say how it goes.

    Raises:
        ValueError: a run failed.
    """
    rounds: dict[Arm, list[Run]] = {arm: [] for arm in arms(job)}
    progress = Progress(tuple(rounds), args.rounds, args.timed)
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
            progress.begin(arm, number)
            run = bench.measured(Variant(arm.name, (*arm.flags, *trace)), number, progress)
            progress.end(run)
            rounds[arm].append(run)
    return tuple(
        replace(
            read_run(args.output / arm.name, arm.title, max(run.warmup for run in runs)),
            rounds=tuple(run.iterations for run in runs),
        )
        for arm, runs in rounds.items()
    )


class Progress:
    """A line for each run that is over and, on a terminal, one that tells what runs now.

    The time left is a guess for each arm, times what the guesses were off so far.
    """

    def __init__(self, arms: Sequence[Arm], num_rounds: int, timed: int) -> None:
        self._num_rounds, self._timed = num_rounds, timed
        self._total_s = num_rounds * sum(self._guess_s(arm) for arm in arms)
        self._done_s = 0.0
        self._began_s = time.monotonic()
        self._arm, self._number = arms[0], 1

    def begin(self, arm: Arm, number: int) -> None:
        """Say which run begins."""
        self._arm, self._number = arm, number
        self(0)

    def __call__(self, done: int) -> None:
        """Say how many of its iterations are over."""
        if sys.stdout.isatty():
            done_s = self._done_s + (START_S + done * self._arm.iteration_s if done else 0)
            of = self._arm.warmup + self._timed
            print(f"\r{self._where} iteration {done} of {of}{self._left(done_s)}\033[K", end="")
            sys.stdout.flush()

    def end(self, run: Run) -> None:
        """Say what the run's iterations took."""
        self._done_s += self._guess_s(self._arm)
        start, end = ("\r", "\033[K") if sys.stdout.isatty() else ("", "")
        spread = f"{Spread.of(run.times_ms)} ms"
        print(f"{start}{self._where} {spread:<22}{self._left(self._done_s)}{end}", flush=True)

    @property
    def _where(self) -> str:
        return f"round {self._number} of {self._num_rounds}  {self._arm.title:<20}"

    def _guess_s(self, arm: Arm) -> float:
        return START_S + (arm.warmup + self._timed) * arm.iteration_s

    def _left(self, done_s: float) -> str:
        passed_s = time.monotonic() - self._began_s
        off = passed_s / done_s if done_s else 1.0
        left_s = max(0.0, self._total_s - done_s) * off
        return f"  about {left_s:.0f} s left" if left_s else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
