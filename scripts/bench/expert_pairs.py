"""Compare pairs of micro-batches with stock Megatron where experts are on several hosts.

    sudo .venv/bin/python -m scripts.bench.expert_pairs

Every rank is a host of a testbed. Attention and experts are paced by sleep (`half_layer_pacing`). A
cell has chunks of some layers, and links on which a layer's all-to-alls, forward and backward, take
a given share of its paced compute if routing is balanced. Variants run in turn.

Of a row, `to stock` is by how much it is faster than stock in the same layout. `bound` is the
variant's time by that of ranks whose computations hide what they send, or are hidden by it, with
the bubble of pairs. `error` is that of the simulator, which knows from a run on free links how long
the computations of `aiao` take, and the rest from the sizes of the job.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from megatron.fold3d.commands.console import faster
from megatron.fold3d.observe.trace_files import read_ranks
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.estimate import Estimate, estimate
from megatron.fold3d.predict.cost_model.model_shape import SHAPES
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.candidates import Candidate
from scripts.bench.options import parser_of
from scripts.bench.runner import Bench, preload
from scripts.bench.summary import markdown
from scripts.bench.testbed import Link, TestbedError, end_on_signals, refuse
from scripts.bench.variants import Job, Variant

_TOPK, _EXPERTS, _WIDTH = 4, 8, 64
EXPERTS = (
    f"--expert-model-parallel-size 2 --num-experts {_EXPERTS} --moe-router-topk {_TOPK} "
    f"--moe-ffn-hidden-size {_WIDTH} --moe-token-dispatcher-type alltoall --disable-bias-linear "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --overlap-grad-reduce"
)
_VIRTUAL = (
    "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 2 "
    "--overlap-p2p-communication-warmup-flush"
)
_SETUP = Setup(data_parallel=2, expert_parallel=2, fp32=True, recompute="none")
_RANKS = 2
_FREE = 1e12  # bit/s
_BURST_BYTES = 9216  # one packet: messages are short
_ROUNDING = 1e-5  # norms are summed in the order of chunks


VARIANTS = {
    "stock 1f1b": ("", Choice.parse("stock", 1)),
    "stock interleaved": (_VIRTUAL, Choice.parse("stock", 2)),
    "aiao": ("--schedule aiao --segments 2", Choice.parse("aiao", 2)),
    "aiao in pairs": ("--schedule aiao:pairs=on --segments 2", Choice.parse("aiao:pairs=on", 2)),
}


class Free(NamedTuple):
    """What was measured on free links.

    Attributes:
        forward_s: by stage.
        backward_s: by stage.
        late_s: by stage, all-to-alls of a forward, which take nothing but their latency there.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    late_s: tuple[float, ...]
    iteration_ms: float


class Cell:
    """Chunks of some layers, and the links of some share.

    Args:
        share: the all-to-alls of a layer as a share of its paced compute.
    """

    def __init__(self, args: argparse.Namespace, layers: int, share: float) -> None:
        self.layers, self._args = layers, args
        self.job = Job(
            num_ranks=_RANKS,
            num_microbatches=args.microbatches,
            num_layers=2 * _RANKS * layers,
            hidden_size=128,
            seq_length=256,
            num_iterations=args.iterations,
        )
        # Half of the tokens stay at home; of four all-to-alls each may take a share of 1.5 halves.
        sent_bits = 8 * 4 * self.job.seq_length * _TOPK * self.job.hidden_size / 2
        self.rate = sent_bits / (1.5 * share * args.half_ms / 1e3)
        self.bench = Bench(
            job=self.job,
            link=Link(
                self.rate, short_first=True, queue_ms=args.queue_ms, burst_bytes=_BURST_BYTES
            ),
            rank_flags=("--half-ms", str(args.half_ms), "--experts", "--nccl-order"),
            real_time=True,
            logs=args.logs / f"{layers}-layers-{share:g}",
        )

    def measured(self) -> dict[str, float]:
        """Return each variant's median over all rounds, in milliseconds.

        Raises:
            ValueError: a run failed, or two differ in their losses.
        """
        times_ms: dict[str, list[float]] = defaultdict(list)
        losses: set[float] = set()
        for number, name in product(range(1, self._args.rounds + 1), VARIANTS):
            times_ms[name] += self._run(name, number, losses)
        if max(losses) - min(losses) > _ROUNDING:
            raise ValueError(f"losses differ: {sorted(losses)}")
        return {name: statistics.median(times) for name, times in times_ms.items()}

    def free(self) -> "Free":
        """Run ``aiao`` on free links, where all-to-alls take next to nothing."""
        folder = self._args.logs / f"trace-{self.layers}"
        traced = f"--trace {folder} --trace-iterations 3-{self.job.num_iterations}"
        iteration_ms = statistics.median(self._run("aiao", 0, set(), traced))
        spans: dict[str, list[float]] = defaultdict(list)
        for events in (i.events for rank in read_ranks(folder) for i in rank.iterations):
            sent = [event for event in events if event.kind == "ep_sync"]
            for event in (event for event in events if event.kind == "compute"):
                name = event.name.rstrip("0123456789")
                spans[name].append(event.end_s - event.start_s)
                inside = (s for s in sent if event.start_s <= s.start_s < event.end_s)
                spans[f"{name} sends"].append(sum(s.end_s - s.start_s for s in inside))
        forward_s, backward_s, late_s = (
            tuple(statistics.median(spans[f"{stage}{what}"]) for stage in range(2 * _RANKS))
            for what in ("F", "B", "F sends")
        )
        return Free(forward_s, backward_s, late_s, iteration_ms)

    def simulated(self, name: str, free: "Free") -> float:
        """Return the milliseconds of a variant: simulated, and what no action has taken."""
        known, on_free_links = self._estimate(name, free), self._estimate("aiao", free, _FREE)
        others_ms = free.iteration_ms - self._iteration_ms("aiao", on_free_links)
        return self._iteration_ms(name, known) + others_ms

    def bound(self, free: "Free") -> float:
        """Return the milliseconds of pairs whose computations hide what their rank sends."""
        name = "aiao in pairs"
        known = self._estimate(name, free)
        sent_s = [s + known.costs.p2p_s for s in known.costs.ep_sync_s]
        forward_s, backward_s = (
            tuple(map(max, times_s, sent_s)) for times_s in (free.forward_s, free.backward_s)
        )
        costs = replace(
            self._estimate(name, free, _FREE).costs,
            forward_s=forward_s,
            backward_s=backward_s,
            ep_sync_s=(),
        )
        return self._iteration_ms(name, replace(known, costs=costs))

    def _iteration_ms(self, name: str, known: Estimate) -> float:
        candidate = Candidate(
            choice=VARIANTS[name][1],
            setup=_SETUP,
            num_ranks=_RANKS,
            num_microbatches=self.job.num_microbatches,
        )
        return 1e3 * timeline_of(candidate, known).period_s

    def _estimate(self, name: str, free: "Free", bits_per_s: float | None = None) -> Estimate:
        """Return what the cost model says, with computations that were measured."""
        shape = replace(
            SHAPES["testbed"],
            num_layers=self.job.num_layers,
            hidden_size=self.job.hidden_size,
            num_attention_heads=2,
            seq_length=self.job.seq_length,
            num_experts=_EXPERTS,
            experts_per_token=_TOPK,
            expert_ffn_hidden_size=_WIDTH,
        )
        hosts = replace(cluster("testbedx4"), nic_bytes_per_s=(bits_per_s or self.rate) / 8)
        segments = len(VARIANTS[name][1].segments)
        known = estimate(shape, hosts, _SETUP, num_ranks=_RANKS, num_segments=segments)
        forward_s, backward_s, ep_sync_s = (
            tuple(
                sum(times_s[stage :: _RANKS * segments]) + sent_s
                for stage, sent_s in enumerate(known.costs.ep_sync_s)
            )
            for times_s in (free.forward_s, free.backward_s, free.late_s)
        )
        costs = replace(
            known.costs,
            forward_s=forward_s,
            backward_s=backward_s,
            weight_s=(),
            ep_sync_s=ep_sync_s,
        )
        return replace(known, costs=costs)

    def _run(self, name: str, number: int, losses: set[float], more: str = "") -> list[float]:
        flags = f"{EXPERTS} {VARIANTS[name][0]} {more}"
        variant = Variant(name.replace(" ", "-"), tuple(flags.split()))
        run = self.bench.measured(variant, number)
        losses.add(run.iterations[-1].loss or 0.0)
        return list(run.times_ms)


def main(argv: Sequence[str]) -> int:
    """Print a table with a row per cell and variant."""
    parser = parser_of(__doc__)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.2, 0.5, 1.0])
    parser.add_argument("--layers", nargs="+", type=int, default=[1, 4], help="of a chunk (1 4)")
    parser.add_argument("--half-ms", type=float, default=60.0, help="forward of half a layer (60)")
    parser.add_argument("--microbatches", type=int, default=8, help="(8)")
    parser.add_argument("--iterations", type=int, default=4, help="(4), of which 2 warm up")
    parser.add_argument("--queue-ms", type=float, default=60.0, help="of a link (60)")
    parser.add_argument("--rounds", type=int, default=1, help="(1)")
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    args = parser.parse_args(argv)
    titles = ("layers", "share", "variant", "ms", "to stock", "bound", "simulated", "error")
    end_on_signals()
    try:
        preload()
        for line in markdown(titles, rows(args)):
            print(line, flush=True)
    except (TestbedError, ValueError) as error:
        return refuse("expert_pairs.py", error)
    return 0


def rows(args: argparse.Namespace) -> Iterator[Sequence[str]]:
    """Yield a line for each variant of a cell, when all of the cell have run."""
    for layers in args.layers:
        free = Cell(args, layers, 1.0).free()
        for share in args.shares:
            cell = Cell(args, layers, share)
            bound_ms = cell.bound(free)
            measured = cell.measured()
            stock = min(ms for name, ms in measured.items() if name.startswith("stock"))
            for name, ms in measured.items():
                simulated_ms = cell.simulated(name, free)
                yield (
                    *(f"{layers}", f"{share:.0%}", name, f"{ms:.0f}"),
                    *(faster(stock / ms - 1), f"{ms / bound_ms:.2f}"),
                    *(f"{simulated_ms:.0f}", f"{simulated_ms / ms - 1:+.1%}"),
                )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
