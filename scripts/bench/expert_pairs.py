"""Compare pairs of micro-batches with stock Megatron where experts are on several hosts.

    sudo .venv/bin/python -m scripts.bench.expert_pairs --shares 0.2 0.5 1 --rounds 3

Every rank is a host of a testbed. Attention and experts are paced by sleep (`expert_pacing`). The
links are shaped so that a layer's all-to-alls, forward and backward, take a given share of its
paced compute if routing is balanced. Variants run in turn. gloo uses the link in one direction at a
time during an all-to-all, so their real share is up to twice as large.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.runner import Bench, preload
from scripts.bench.testbed import Link, TestbedError, end_on_signals, refuse
from scripts.bench.variants import Job, Variant

_TOPK = 4
EXPERTS = (
    f"--expert-model-parallel-size 2 --num-experts 8 --moe-router-topk {_TOPK} "
    "--moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall --disable-bias-linear "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --overlap-grad-reduce"
)
_VIRTUAL = (
    "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 2 "
    "--overlap-p2p-communication-warmup-flush"
)
VARIANTS = {
    "stock 1f1b": "",
    "stock interleaved": _VIRTUAL,
    "aiao": "--schedule aiao --segments 2",
    "aiao in pairs": "--schedule aiao:pairs=on --segments 2",
    "1f1b in pairs": "--schedule 1f1b:pairs=on --segments 1",
}


def main(argv: Sequence[str]) -> int:
    """Print a row per share of communication, with each variant's median and its ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", nargs="+", type=float, default=[0.2, 0.5, 1.0])
    parser.add_argument("--half-ms", type=float, default=30.0, help="forward of half a layer (30)")
    parser.add_argument("--layers", type=int, default=4, help="(4)")
    parser.add_argument("--microbatches", type=int, default=8, help="(8)")
    parser.add_argument("--iterations", type=int, default=6, help="(6), of which 2 warm up")
    parser.add_argument("--queue-ms", type=float, default=50.0, help="of a link (50)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    args = parser.parse_args(argv)
    job = Job(
        num_ranks=2,
        data_parallel=2,
        num_microbatches=args.microbatches,
        num_layers=args.layers,
        hidden_size=128,
        seq_length=128,
        micro_batch_size=1,
        num_iterations=args.iterations,
        clip_grad=1.0,
        recompute=False,
    )
    sent_bits = 8 * 4 * job.seq_length * _TOPK * job.hidden_size / 2  # half of it stays at home
    try:
        preload()
        for share in args.shares:
            rate = sent_bits / (1.5 * share * args.half_ms / 1e3)
            bench = Bench(
                job=job,
                link=Link(rate, queue_ms=args.queue_ms),
                rank_flags=("--half-ms", str(args.half_ms), "--nccl-order"),
                warmup=2,
                real_time=True,
                timeout_s=300.0,
                logs=args.logs,
            )
            print(f"{share:g} of compute, {rate / 1e6:.0f} Mb/s: {_row(bench, args.rounds)}")
    except TestbedError as error:
        return refuse("expert_pairs.py", error)
    return 0


def _row(bench: Bench, num_rounds: int) -> str:
    """Return each variant's median over all rounds, and stock's best as a multiple of it."""
    times_ms: dict[str, list[float]] = defaultdict(list)
    losses = set()
    for number in range(1, num_rounds + 1):
        for name, flags in VARIANTS.items():
            variant = Variant(name.replace(" ", "-"), tuple(f"{EXPERTS} {flags}".split()))
            run = bench.run(variant, number)
            if run.failure:
                return f"{name}: {run.failure}"
            times_ms[name] += run.times_ms
            losses.add(run.iterations[-1].loss)
    medians = {name: statistics.median(times) for name, times in times_ms.items()}
    stock = min(ms for name, ms in medians.items() if name.startswith("stock"))
    cells = [f"{name} {ms:.0f} ms ({stock / ms:.2f})" for name, ms in medians.items()]
    return "; ".join([*cells, f"losses of {len(losses)} kind{'s' * (len(losses) > 1)}"])


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main(sys.argv[1:]))
