"""Show what a slow link costs the executor: how long sends block it, and how long it waits.

    sudo .venv/bin/python -m scripts.bench.sends --pp 2 --rates 200mbit 20mbit

A pipeline without replicas trains on a testbed, layers paced by sleep. Every rank times its calls
of ``P2P.send``, which are never to block, and of ``P2P.take``, which waits for a message that is
not there yet. Where the link is the limit, an iteration takes what its busier direction needs for
the bytes, and the time that sends block stays where it was on fast links.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pretrain_gpt
from fold3d_patches import registry
from fold3d_patches.registry import Patch
from megatron.fold3d.observe import training_log
from scripts.bench import layer_pacing
from scripts.bench.processes import RealTimeFlag
from scripts.bench.testbed import Link, Testbed, TestbedError, end_on_signals, parse_rate, refuse
from scripts.bench.variants import Job

_ROOT = Path(__file__).parents[2]
_WARMUP = 3
_P2P = "megatron.fold3d.runtime.transfers.p2p:P2P"


def patches(spent_s: dict[str, list[float]]) -> tuple[Patch, ...]:
    """Time each call of a rank's transfers; a list per kind, a sum per iteration."""

    def timed(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                start_s = time.perf_counter()
                try:
                    return upstream(*args, **kwargs)
                finally:
                    spent_s[kind][-1] += time.perf_counter() - start_s

            return call

        return make

    def close(upstream: Callable[..., Any]) -> Callable[..., Any]:
        def drain(self: Any) -> None:
            upstream(self)
            for sums in spent_s.values():
                sums.append(0.0)

        return drain

    return (
        Patch(target=f"{_P2P}.send", make=timed("send")),
        Patch(target=f"{_P2P}.take", make=timed("take")),
        Patch(target=f"{_P2P}.drain", make=close),
    )


def train(argv: Sequence[str]) -> int:
    """Be one rank: ``OUT FORWARD_MS BACKWARD_MS FLAGS``; leave what its transfers cost in OUT."""
    out, forward_ms, backward_ms, *flags = argv
    spent_s: dict[str, list[float]] = {"send": [0.0], "take": [0.0]}
    pacing = layer_pacing.patches(float(forward_ms) / 1e3, float(backward_ms) / 1e3)
    with registry.apply([*pacing, *patches(spent_s)]):
        code = pretrain_gpt.main(flags)
    Path(f"{out}.{os.environ['RANK']}").write_text(json.dumps(spent_s))
    return code


def measure(job: Job, link: Link, args: argparse.Namespace) -> str:
    """Run the job on links of one rate, and return its row of the table."""
    logs = args.logs / f"{link.rate_bit_s or 0:.0f}"
    flags = [*job.flags(), "--schedule", "aiao", "--segments", str(args.segments)]
    command = (sys.executable, "-W", "ignore", "-m", "scripts.bench.sends", "--be-a-rank")
    pace = (str(args.forward_ms), str(args.backward_ms))
    with Testbed(job.world_size, link) as testbed:
        ranks = testbed.start([*command, str(logs / "spent"), *pace, *flags], logs, cwd=_ROOT)
        log = ranks.logs[-1]  # the last rank's is Megatron's

        def hurry() -> None:
            if args.real_time and training_log.parse(log.read_text()):  # start-up takes CPU
                ranks.hurry()

        codes = ranks.wait(300.0, hurry)
        busiest = max(host.busier_bytes for host in testbed.traffic())
    if any(code != 0 for code in codes):
        raise ValueError(f"ranks ended with {codes}; logs in {logs}")
    iterations = training_log.parse(log.read_text())
    iteration_ms = statistics.median(i.elapsed_ms for i in iterations[_WARMUP:])
    link_ms = busiest / job.num_iterations * 8e3 / link.rate_bit_s if link.rate_bit_s else 0.0
    spent = [json.loads(Path(f"{logs / 'spent'}.{r}").read_text()) for r in range(job.world_size)]
    send_ms, take_ms = (
        max(statistics.median(sums[kind][_WARMUP:-1]) for sums in spent) * 1e3
        for kind in ("send", "take")
    )
    rate = f"{link.rate_bit_s / 1e6:g} Mb/s" if link.rate_bit_s else "unshaped"
    return f"| {rate} | {iteration_ms:.0f} | {link_ms:.0f} | {send_ms:.1f} | {take_ms:.0f} |"


def main(argv: Sequence[str]) -> int:
    """Measure one rate after another, and print a table."""
    if argv[:1] == ["--be-a-rank"]:
        return train(argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pp", type=int, default=2, help="(2)")
    parser.add_argument("--segments", type=int, default=4, help="(4)")
    parser.add_argument("--rates", nargs="+", default=["unshaped", "200mbit", "50mbit", "20mbit"])
    parser.add_argument("--forward-ms", type=float, default=6.0, help="of a paced layer (6)")
    parser.add_argument("--backward-ms", type=float, default=12.0, help="of a paced layer (12)")
    parser.add_argument("--iterations", type=int, default=10, help="of each run (10)")
    parser.add_argument("--real-time", action=RealTimeFlag, help="before all other processes")
    parser.add_argument("--logs", type=Path, default=_ROOT / "out/sends", help="(out/sends)")
    args = parser.parse_args(argv)
    end_on_signals()
    job = Job(
        num_ranks=args.pp,
        data_parallel=1,
        num_microbatches=8,
        num_layers=2 * args.pp * args.segments,
        hidden_size=256,
        seq_length=64,
        micro_batch_size=1,
        num_iterations=args.iterations,
        clip_grad=1.0,
        recompute=False,
    )
    print("| link | iteration ms | link ms | in sends ms | waiting for messages ms |")
    print("|---|--:|--:|--:|--:|")
    try:
        for rate in args.rates:
            print(measure(job, Link(parse_rate(rate)), args), flush=True)
    except (TestbedError, ValueError) as error:
        return refuse("sends.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
