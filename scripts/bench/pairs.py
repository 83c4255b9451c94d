"""Compare pairs of micro-batches with stock Megatron where tensor parallelism crosses a slow link.

    sudo .venv/bin/python -m scripts.bench.pairs --shares 0.25 0.5 1

Two tensor-parallel ranks train on two hosts of a testbed. Each half of a layer is paced by sleep,
and the link is shaped so that its collective takes a given share of the half's forward. Stock and
ours, each with and without sequence parallelism, run in turn. Beside the measured ratio to stock
stands that of the formula (Merak Sec. 5.3). gloo's reduce-scatter moves as many bytes as its
all-reduce, so sequence parallelism has more traffic here than over NCCL.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from statistics import median

from megatron.fold3d.predict.simulator.pair_times import pair_s
from scripts.bench.processes import RealTimeFlag
from scripts.bench.runner import Bench
from scripts.bench.tables import parser_of, print_table
from scripts.bench.testbed import Link
from scripts.bench.variants import Job, Variant

_SP = "--sequence-parallel"
VARIANTS = {
    "stock": ("--schedule", "stock"),
    "stock, sequence parallel": ("--schedule", "stock", _SP),
    "ours in pairs": ("--schedule", "afab:pairs=on"),
    "ours in pairs, sequence parallel": ("--schedule", "afab:pairs=on", _SP),
}


def predicted_ratio(share: float, num_layers: int) -> float:
    """Return stock's time over that of pairs by the formula: a half's forward takes one."""
    halves = 2 * num_layers
    forward, backward, sync = 1.0 * halves, 2.0 * halves, share * halves
    stock = 2 * (forward + sync) + 2 * (backward + sync)
    return stock / (pair_s(forward, sync, halves) + pair_s(backward, sync, halves))


def rows(args: argparse.Namespace) -> Iterator[Sequence[str]]:
    """Yield a line for each variant and share, in turn."""
    job = Job(
        num_ranks=1,
        data_parallel=1,
        tensor_parallel=2,
        num_microbatches=4,
        num_layers=args.layers,
        seq_length=64,
        num_iterations=args.iterations,
    )
    collective_bits = 8 * 4 * job.seq_length * job.hidden_size  # over two ranks, each direction
    for share in args.shares:
        bench = Bench(
            job=job,
            link=Link(collective_bits / (share * args.half_ms / 1e3)),
            rank_flags=("--half-ms", str(args.half_ms)),
            real_time=args.real_time,
            logs=args.logs,
        )
        stock_ms = 0.0
        for name, flags in VARIANTS.items():
            folder = "-".join(word.strip("-") for word in flags)
            iteration_ms = median(bench.measured(Variant(folder, flags)).times_ms)
            stock_ms = stock_ms or iteration_ms
            formula = f"{predicted_ratio(share, args.layers):.2f}" if "ours" in name else ""
            ratio = f"{stock_ms / iteration_ms:.2f}"
            yield f"{share:.0%}", name, f"{iteration_ms:.0f}", ratio, formula


def main(argv: Sequence[str]) -> int:
    """Measure one share after another, and print a table."""
    parser = parser_of(__doc__, logs="pairs")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.25, 0.5, 1.0])
    parser.add_argument("--half-ms", type=float, default=10.0, help="forward of a half layer (10)")
    parser.add_argument("--layers", type=int, default=4, help="(4)")
    parser.add_argument("--iterations", type=int, default=7, help="of each run (7)")
    parser.add_argument("--real-time", action=RealTimeFlag, help="before all other processes")
    args = parser.parse_args(argv)
    titles = ("collective / forward", "variant", "iteration ms", "stock / it", "formula")
    return print_table("pairs.py", titles, rows(args))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
