"""Measure recomputation that starts early, and layers that are not recomputed, under AIAO.

    sudo .venv/bin/python -m scripts.bench.recompute --microbatches 8 16

Four pipeline ranks train on four hosts of a testbed, each layer paced by sleep: a forward lasts F,
a backward 2 F, and a recomputed layer F more. All variants run in turn: every layer recomputed in
its backward, all of them early, those of the last segment not at all, and both. Beside the
time that each saves of the first stands that of the simulator.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from statistics import median

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job as PlannedJob
from megatron.fold3d.plan.compile import lower
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
from scripts.bench.runner import Bench, paced
from scripts.bench.tables import parser_of, print_table
from scripts.bench.testbed import Link
from scripts.bench.variants import Job, Variant

_RANKS = 4


def variants(num_layers: int, segments: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yield names, the recomputed layers of each stage, and whether they are early."""
    each, first = num_layers // (_RANKS * segments), _RANKS * (segments - 1)
    every = (each,) * (_RANKS * segments)
    last_kept = (each,) * first + (0,) * _RANKS
    yield "all in their backwards", every, False
    yield "all early", every, True
    yield "none in the last segment", last_kept, False
    yield "both", last_kept, True


def simulated_s(job: Job, word: str, counts: Sequence[int], segments: int) -> float:
    """Return an iteration by the simulator, in forwards of a layer; transfers take no time."""
    each, stages = job.num_layers / (_RANKS * segments), _RANKS * segments
    order = build(
        "aiao", num_ranks=_RANKS, num_segments=segments, num_microbatches=job.num_microbatches
    )
    costs = Costs(
        forward_s=(each,) * stages,
        backward_s=tuple(2 * each + count for count in counts),
        recompute_s=tuple(map(float, counts)),
    )
    return simulate(lower(PlannedJob.of(order, Choice.parse(word, segments))), costs).period_s


def main(argv: Sequence[str]) -> int:
    """Measure one number of micro-batches after another, and print a table."""
    parser = parser_of(__doc__, logs="recompute")
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--segments", type=int, default=2, help="(2)")
    parser.add_argument("--layers", type=int, default=16, help="(16)")
    parser.add_argument("--forward-ms", type=float, default=20.0, help="of a layer (20)")
    parser.add_argument("--iterations", type=int, default=6, help="of each run (6)")
    args = parser.parse_args(argv)
    if args.layers % (_RANKS * args.segments):
        rule = f"stages have equally many; give a multiple of {_RANKS * args.segments}"
        parser.error(f"--layers {args.layers}: {rule}")
    titles = ("micro-batches", "recomputed", "iteration ms", "less time", "simulated")
    return print_table("recompute.py", titles, rows(args))


def rows(args: argparse.Namespace) -> Iterator[Sequence[str]]:
    """Yield a line for each variant and number of micro-batches, in turn."""
    for microbatches in args.microbatches:
        job = Job(
            num_ranks=_RANKS,
            data_parallel=1,
            num_microbatches=microbatches,
            num_layers=args.layers,
            hidden_size=64,
            num_iterations=args.iterations,
        )
        bench = Bench(
            job=job,
            link=Link(),
            rank_flags=paced(args.forward_ms, 2 * args.forward_ms),
            logs=args.logs,
        )
        first_ms = first_s = 0.0
        for number, (name, counts, early) in enumerate(variants(args.layers, args.segments)):
            word = f"aiao{':recompute=early' * early}"
            flags = ("--schedule", word, "--segments", str(args.segments))
            recomputed = ("--recompute-layers", ",".join(map(str, counts)))
            variant = Variant(f"m{microbatches}-{number}", (*flags, *recomputed))
            iteration_ms = median(bench.measured(variant).times_ms)
            iteration_s = simulated_s(job, word, counts, args.segments)
            first_ms, first_s = first_ms or iteration_ms, first_s or iteration_s
            gains = (1 - iteration_ms / first_ms, 1 - iteration_s / first_s)
            shown = [f"{gain:.1%}" if number else "" for gain in gains]
            yield str(microbatches), name, f"{iteration_ms:.0f}", *shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
