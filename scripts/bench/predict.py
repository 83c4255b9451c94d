"""What the simulator says of the runs of a comparison, variant by variant.

The costs are those of the job and the links. One number is measured, what an iteration of stock's
default takes without shaped links: what that is above its simulation is an iteration's overhead,
the same for every variant.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from megatron.fold3d.config.schedule_flags import add_schedule_word, word_of
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.schedule_word import STOCK
from megatron.fold3d.predict.cost_model.cluster import Cluster, cluster
from megatron.fold3d.predict.cost_model.model_shape import SHAPES, ModelShape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.candidates import Candidate, estimate_of
from scripts.bench import summary
from scripts.bench.summary import markdown
from scripts.bench.testbed import Link
from scripts.bench.variants import Job

_UNSHAPED_BYTES_PER_S = 1e12


@dataclass(frozen=True, slots=True)
class Row:
    """One variant; all times are those of an iteration."""

    name: str
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True, slots=True)
class Simulation:
    """What all variants train, on what."""

    shape: ModelShape
    hosts: Cluster
    num_ranks: int
    num_microbatches: int
    setup: Setup

    @classmethod
    def of(cls, job: Job, layer_ms: tuple[float, float], link: Link) -> Self:
        """Return the simulation of a job, whose layers are paced, on links.

        Raises:
            ValueError: layers were not paced, so nothing tells how long they take.
        """
        forward_ms, backward_ms = layer_ms
        if not forward_ms or backward_ms != 2 * forward_ms:
            raise ValueError(
                f"layers were paced to {forward_ms} ms forward and {backward_ms} ms backward; "
                "predicted are jobs whose layers take twice as long backward as forward"
            )
        shape = replace(
            SHAPES["testbed"],
            num_layers=job.num_layers,
            hidden_size=job.hidden_size,
            num_attention_heads=max(1, job.hidden_size // 64),
            seq_length=job.seq_length,
            untied=job.untied,
        )
        flops = job.micro_batch_size * shape.layer_flops(0)
        host = cluster(f"testbedx{job.world_size}")
        hosts = replace(
            host,
            gpu_flops_per_s=flops / forward_ms * 1e3,
            nic_bytes_per_s=(link.rate_bit_s or _UNSHAPED_BYTES_PER_S) / 8,
            nic_latency_s=host.nic_latency_s + 2 * link.delay_ms / 1e3,
        )
        setup = Setup(
            data_parallel=job.data_parallel,
            microbatch_size=job.micro_batch_size,
            recompute="full" if job.recompute else "none",
            fp32=job.precision == "fp32",
            small_gradients=job.precision == "bf16-grads",
        )
        return cls(shape, hosts, job.num_ranks, job.num_microbatches, setup)

    @property
    def unshaped(self) -> Self:
        """The same on links that nothing waits for."""
        return replace(self, hosts=replace(self.hosts, nic_bytes_per_s=_UNSHAPED_BYTES_PER_S))

    def with_overhead(self, overhead_ms: float) -> Self:
        """The same with an overhead per iteration."""
        return replace(self, hosts=replace(self.hosts, iteration_overhead_s=overhead_ms / 1e3))

    def slower(self, factor: float) -> Self:
        """The same with computations that take ``factor`` times as long."""
        flops_per_s = self.hosts.gpu_flops_per_s / factor
        return replace(self, hosts=replace(self.hosts, gpu_flops_per_s=flops_per_s))

    def iteration_ms(self, flags: Sequence[str]) -> float:
        """Return a variant's iteration, simulated.

        Raises:
            ValueError: the planner knows no such variant.
        """
        candidate = self.candidate(flags)
        known = estimate_of(self.shape, self.hosts, candidate)
        return timeline_of(candidate, known).period_s * 1e3

    def candidate(self, flags: Sequence[str]) -> Candidate:
        """Return what the planner calls a variant; how launches are aligned makes no difference."""
        parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
        add_schedule_word(parser, "the order, and what goes with it")
        parser.add_argument("--segments", type=int)
        parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, dest="segments")
        parser.add_argument(
            "--microbatch-group-size-per-virtual-pipeline-stage", type=int, dest="group"
        )
        parser.add_argument("--clip-grad")  # a step that waits for the norm is not predicted
        for flag in (
            *("--overlap-grad-reduce", "--overlap-param-gather", "--use-distributed-optimizer"),
            *("--overlap-p2p-communication-warmup-flush", "--no-align-grad-reduce"),
            "--no-gradient-accumulation-fusion",
        ):
            parser.add_argument(flag, action="store_true")
        try:
            args, unknown = parser.parse_known_args(list(flags))
        except argparse.ArgumentError as error:
            raise ValueError(str(error)) from None
        word, segments = word_of(args), args.segments or 1
        if word.order not in (STOCK, "aiao") or {part.key for part in word.parts} - {
            "step",
            "share",
            "wgrad",
        }:
            unknown = ["an order or a choice of its own"]
        if unknown:
            raise ValueError(f"found {unknown[0]}; it is not predicted")
        choice = replace(Choice.parse(str(word), segments), group=args.group)
        return Candidate(
            choice=choice,
            setup=replace(self.setup, distributed_optimizer=args.use_distributed_optimizer),
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
        )


def rows(simulation: Simulation, found: Iterable[summary.Row]) -> list[Row]:
    """Return measured and predicted times of the variants that the planner knows.

    Raises:
        ValueError: stock's default, whose time the overhead follows from, has not run.
    """
    found = list(found)
    default = summary.default_stock(found)
    if default is None:
        raise ValueError("stock's default has not run; without it nothing is predicted")
    own_ms = simulation.unshaped.iteration_ms(default.variant.flags)
    simulation = simulation.with_overhead(max(0.0, default.compute_ms - own_ms))
    predicted = []
    for row in found:
        try:
            predicted_ms = simulation.iteration_ms(row.variant.flags)
        except ValueError as error:
            print(f"{row.variant.name}: {error}", file=sys.stderr)
            continue
        predicted.append(Row(row.variant.name, row.spread.median_ms, predicted_ms))
    return predicted


def table(found: Sequence[Row]) -> str:
    """Spell predictions as Markdown, with the largest error below."""
    times = ((f"{row.measured_ms:.0f}", f"{row.predicted_ms:.0f}") for row in found)
    cells = [(r.name, *ms, f"{r.error:+.1%}") for r, ms in zip(found, times, strict=True)]
    titles = ("variant", "measured ms", "predicted ms", "error")
    worst = max((abs(row.error) for row in found), default=0.0)
    return "\n".join([*markdown(titles, cells), "", f"Largest error {worst:.1%}"])
