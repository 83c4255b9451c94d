"""Measure recomputation that starts early, and layers that are not recomputed, under AIAO.

    sudo .venv/bin/python -m scripts.bench.recompute --microbatches 8 16

Four pipeline ranks train on four hosts of a testbed, each layer paced by sleep: a forward lasts F,
a backward 2 F, and a recomputed layer F more. All variants run in turn: every layer recomputed in
its backward, all of them early, those of the last segment not at all, and both. Beside the
time that each saves of the first stands that of the simulator.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.fold3d.observe import training_log
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import lower
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
from scripts.bench.testbed import Link, Testbed, TestbedError, end_on_signals, refuse
from scripts.bench.variants import Job

_ROOT = Path(__file__).parents[2]
_RANKS = 4
_WARMUP = 2


def variants(num_layers: int, segments: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yield names, the recomputed layers of each stage, and whether they are early."""
    each, first = num_layers // (_RANKS * segments), _RANKS * (segments - 1)
    every = (each,) * (_RANKS * segments)
    last_kept = (each,) * first + (0,) * _RANKS
    yield "all in their backwards", every, False
    yield "all early", every, True
    yield "none in the last segment", last_kept, False
    yield "both", last_kept, True


def simulated_s(
    counts: Sequence[int], *, early: bool, segments: int, microbatches: int, num_layers: int
) -> float:
    """Return an iteration by the simulator, in forwards of a layer; transfers take no time."""
    each, stages = num_layers / (_RANKS * segments), _RANKS * segments
    order = build("aiao", num_ranks=_RANKS, num_segments=segments, num_microbatches=microbatches)
    costs = Costs(
        forward_s=(each,) * stages,
        backward_s=tuple(2 * each + count for count in counts),
        recompute_s=tuple(map(float, counts)),
    )
    choice = Choice.plain("aiao", segments)
    plan = lower(order, choice.changed(recompute="early") if early else choice)
    return simulate(plan, costs).period_s


def measure(job: Job, flags: Sequence[str], logs: Path, args: argparse.Namespace) -> float:
    """Return the median iteration of one run, in milliseconds."""
    paced = ("--forward-ms", str(args.forward_ms), "--backward-ms", str(2 * args.forward_ms))
    rank = (sys.executable, "-W", "ignore", "-m", "scripts.bench.rank", *paced, "--")
    with Testbed(_RANKS, Link()) as testbed:
        ranks = testbed.start([*rank, *job.flags(), *flags], logs, cwd=_ROOT)
        codes = ranks.wait(300.0)
        log = ranks.logs[-1].read_text()
    if any(code != 0 for code in codes):
        raise ValueError(f"ranks ended with {codes}; logs in {logs}")
    return statistics.median(i.elapsed_ms for i in training_log.parse(log)[_WARMUP:])


def main(argv: Sequence[str]) -> int:
    """Measure one number of micro-batches after another, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--segments", type=int, default=2, help="(2)")
    parser.add_argument("--layers", type=int, default=16, help="(16)")
    parser.add_argument("--forward-ms", type=float, default=20.0, help="of a layer (20)")
    parser.add_argument("--iterations", type=int, default=6, help="of each run (6)")
    parser.add_argument("--logs", type=Path, default=_ROOT / "out/recompute", help="(out/...)")
    args = parser.parse_args(argv)
    end_on_signals()
    try:
        if args.layers % (_RANKS * args.segments):
            raise ValueError(
                f"--layers {args.layers}: stages have equally many; give a multiple of "
                f"{_RANKS * args.segments}"
            )
        print("| micro-batches | recomputed | iteration ms | less time | simulated |")
        print("|--:|---|--:|--:|--:|")
        for row in _rows(args):
            print(f"| {' | '.join(row)} |", flush=True)
    except (TestbedError, ValueError) as error:
        return refuse("recompute.py", error)
    return 0


def _rows(args: argparse.Namespace) -> Iterator[Sequence[str]]:
    for microbatches in args.microbatches:
        job = Job(
            num_ranks=_RANKS,
            data_parallel=1,
            num_microbatches=microbatches,
            num_layers=args.layers,
            hidden_size=64,
            seq_length=32,
            micro_batch_size=1,
            num_iterations=args.iterations,
            clip_grad=1.0,
            recompute=False,
        )
        first_ms = first_s = 0.0
        for number, (name, counts, early) in enumerate(variants(args.layers, args.segments)):
            flags = [
                "--schedule",
                f"aiao{':recompute=early' * early}",
                "--segments",
                str(args.segments),
            ]
            flags += ["--recompute-layers", ",".join(map(str, counts))]
            logs = args.logs / f"m{microbatches}-{number}"
            iteration_ms = measure(job, flags, logs, args)
            iteration_s = simulated_s(
                counts,
                early=early,
                segments=args.segments,
                microbatches=microbatches,
                num_layers=args.layers,
            )
            first_ms, first_s = first_ms or iteration_ms, first_s or iteration_s
            gains = (1 - iteration_ms / first_ms, 1 - iteration_s / first_s)
            shown = [f"{gain:.1%}" if number else "" for gain in gains]
            yield str(microbatches), name, f"{iteration_ms:.0f}", *shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
