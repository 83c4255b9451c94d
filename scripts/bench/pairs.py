"""Compare pairs of micro-batches with stock Megatron where tensor parallelism crosses a slow link.

    sudo .venv/bin/python -m scripts.bench.pairs --shares 0.25 0.5 1

Two tensor-parallel ranks train on two hosts of a testbed. Each half of a layer is paced by sleep,
and the link is shaped so that its collective takes a given share of the half's forward. Stock and
ours, each with and without sequence parallelism, run in turn. Beside the measured ratio to stock
stands that of the formula (Merak Sec. 5.3). gloo's reduce-scatter moves as many bytes as its
all-reduce, so sequence parallelism has more traffic here than over NCCL.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import pretrain_gpt
from fold3d_patches import registry
from megatron.fold3d.observe import training_log
from megatron.fold3d.predict.simulator.pair_times import pair_s
from scripts.bench import half_layer_pacing
from scripts.bench.processes import RealTimeFlag
from scripts.bench.testbed import Link, Testbed, TestbedError, end_on_signals, refuse
from scripts.bench.variants import Job

_ROOT = Path(__file__).parents[2]
_WARMUP = 2
_TP = ("--tensor-model-parallel-size", "2")
_SP = "--sequence-parallel"
VARIANTS = {
    "stock": ("--schedule", "stock"),
    "stock, sequence parallel": ("--schedule", "stock", _SP),
    "ours in pairs": ("--schedule", "afab:pairs=on"),
    "ours in pairs, sequence parallel": ("--schedule", "afab:pairs=on", _SP),
}


def train(argv: Sequence[str]) -> int:
    """Be one rank: ``FORWARD_MS FLAGS``."""
    forward_s = float(argv[0]) / 1e3
    with registry.apply([*half_layer_pacing.patches(forward_s, 2 * forward_s)]):
        return pretrain_gpt.main(list(argv[1:]))


def measure(job: Job, flags: Sequence[str], link: Link, args: argparse.Namespace) -> float:
    """Return the median iteration of one run, in milliseconds."""
    logs = args.logs / "-".join(word.strip("-") for word in flags)
    command = (sys.executable, "-W", "ignore", "-m", "scripts.bench.pairs", "--be-a-rank")
    with Testbed(2, link) as testbed:
        argv = [*command, str(args.half_ms), *job.flags(), *_TP, *flags]
        ranks = testbed.start(argv, logs, cwd=_ROOT)
        log = ranks.logs[-1]  # the last rank's is Megatron's

        def hurry() -> None:
            if args.real_time and training_log.parse(log.read_text()):  # start-up takes CPU
                ranks.hurry()

        codes = ranks.wait(300.0, hurry)
    if any(code != 0 for code in codes):
        raise ValueError(f"ranks ended with {codes}; logs in {logs}")
    iterations = training_log.parse(log.read_text())
    return statistics.median(i.elapsed_ms for i in iterations[_WARMUP:])


def predicted_ratio(share: float, num_layers: int) -> float:
    """Return stock's time over that of pairs by the formula: a half's forward takes one."""
    halves = 2 * num_layers
    forward, backward, sync = 1.0 * halves, 2.0 * halves, share * halves
    stock = 2 * (forward + sync) + 2 * (backward + sync)
    return stock / (pair_s(forward, sync, halves) + pair_s(backward, sync, halves))


def main(argv: Sequence[str]) -> int:
    """Measure one share after another, and print a table."""
    if argv[:1] == ["--be-a-rank"]:
        return train(argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", nargs="+", type=float, default=[0.25, 0.5, 1.0])
    parser.add_argument("--half-ms", type=float, default=10.0, help="forward of a half layer (10)")
    parser.add_argument("--layers", type=int, default=4, help="(4)")
    parser.add_argument("--iterations", type=int, default=7, help="of each run (7)")
    parser.add_argument("--real-time", action=RealTimeFlag, help="before all other processes")
    parser.add_argument("--logs", type=Path, default=_ROOT / "out/pairs", help="(out/pairs)")
    args = parser.parse_args(argv)
    end_on_signals()
    job = Job(
        num_ranks=1,
        data_parallel=1,
        num_microbatches=4,
        num_layers=args.layers,
        hidden_size=256,
        seq_length=64,
        micro_batch_size=1,
        num_iterations=args.iterations,
        clip_grad=1.0,
        recompute=False,
    )
    collective_bits = 8 * 4 * job.seq_length * job.hidden_size  # over two ranks, each direction
    print("| collective / forward | variant | iteration ms | stock / it | formula |")
    print("|--:|---|--:|--:|--:|")
    try:
        for share in args.shares:
            link = Link(collective_bits / (share * args.half_ms / 1e3))
            stock_ms = 0.0
            for name, flags in VARIANTS.items():
                iteration_ms = measure(job, flags, link, args)
                stock_ms = stock_ms or iteration_ms
                formula = f"{predicted_ratio(share, args.layers):.2f}" if "ours" in name else ""
                ratio = f"{stock_ms / iteration_ms:.2f}"
                row = (f"{share:.0%}", name, f"{iteration_ms:.0f}", ratio, formula)
                print(f"| {' | '.join(row)} |", flush=True)
    except (TestbedError, ValueError) as error:
        return refuse("pairs.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
