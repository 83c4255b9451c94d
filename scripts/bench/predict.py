"""Predict what ``compare.py --json FILE`` has measured, variant by variant.

    .venv/bin/python -m scripts.bench.predict FILE

The costs are those of the job and the links that the file names. One number is measured, what an
iteration of stock's default takes without shaped links: what that is above its simulation is an
iteration's overhead, the same for every variant. Exits with 1 if a prediction is off by over 10 %.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.fold3d.config.schedule_flags import add_schedule_word, word_of
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.schedule_word import STOCK
from megatron.fold3d.predict.cost_model.cluster import Cluster, cluster
from megatron.fold3d.predict.cost_model.estimate import estimate
from megatron.fold3d.predict.cost_model.model_shape import SHAPES, ModelShape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.candidates import Candidate
from scripts.bench.testbed import parse_rate
from scripts.bench.variants import DEFAULT

LIMIT = 0.1
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
class Job:
    """What all variants train, on what: from the arguments that `compare` was given."""

    shape: ModelShape
    hosts: Cluster
    num_ranks: int
    num_microbatches: int
    setup: Setup

    @classmethod
    def read(cls, arguments: dict[str, str]) -> "Job":
        """Read the ``arguments`` of a report.

        Raises:
            ValueError: layers were not paced, so nothing tells how long they take.
        """
        number = {key: float(value) for key, value in arguments.items() if _is_number(value)}
        if not number["forward_ms"] or number["backward_ms"] != 2 * number["forward_ms"]:
            raise ValueError(
                f"layers were paced to {arguments['forward_ms']} ms forward and "
                f"{arguments['backward_ms']} ms backward; predicted are jobs whose layers take "
                "twice as long backward as forward"
            )
        shape = replace(
            SHAPES["testbed"],
            num_layers=int(number["layers"]),
            hidden_size=int(number["hidden"]),
            num_attention_heads=max(1, int(number["hidden"]) // 64),
            seq_length=int(number["seq_length"]),
            untied=arguments["untied"] == "True",
        )
        pp, dp, size = (int(number[key]) for key in ("pp", "dp", "micro_batch_size"))
        host = replace(
            cluster(f"testbedx{pp * dp}"),
            gpu_flops_per_s=size * shape.layer_flops(0) / number["forward_ms"] * 1e3,
            nic_bytes_per_s=(parse_rate(arguments["rate"]) or _UNSHAPED_BYTES_PER_S) / 8,
        )
        delay_s = number["delay_ms"] / 1e3
        setup = Setup(
            data_parallel=dp,
            microbatch_size=size,
            recompute="full" if arguments["recompute"] == "True" else "none",
            fp32=True,
        )
        host = replace(host, nic_latency_s=host.nic_latency_s + 2 * delay_s)
        return cls(shape, host, pp, int(number["microbatches"]), setup)

    @property
    def unshaped(self) -> "Job":
        """The same on links that nothing waits for."""
        return replace(self, hosts=replace(self.hosts, nic_bytes_per_s=_UNSHAPED_BYTES_PER_S))

    def with_overhead(self, overhead_ms: float) -> "Job":
        """The same with an overhead per iteration."""
        return replace(self, hosts=replace(self.hosts, iteration_overhead_s=overhead_ms / 1e3))

    def slower(self, factor: float) -> "Job":
        """The same with computations that take ``factor`` times as long."""
        flops_per_s = self.hosts.gpu_flops_per_s / factor
        return replace(self, hosts=replace(self.hosts, gpu_flops_per_s=flops_per_s))

    def iteration_ms(self, flags: Sequence[str]) -> float:
        """Return a variant's iteration, simulated.

        Raises:
            ValueError: the planner knows no such variant.
        """
        candidate = self.candidate(flags)
        known = estimate(
            self.shape,
            self.hosts,
            candidate.setup,
            num_ranks=self.num_ranks,
            num_segments=candidate.num_segments,
        )
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


def rows(report: dict[str, Any]) -> list[Row]:
    """Return measured and predicted times of the variants that the planner knows."""
    job = Job.read(report["arguments"])
    default = next(r for r in report["rows"] if r["variant"]["name"] == DEFAULT.name)
    overhead_ms = default["compute_ms"] - job.unshaped.iteration_ms(DEFAULT.flags)
    job = job.with_overhead(max(0.0, overhead_ms))
    found = []
    for row in report["rows"]:
        variant = row["variant"]
        try:
            predicted_ms = job.iteration_ms(variant["flags"])
        except ValueError as error:
            print(f"{variant['name']}: {error}", file=sys.stderr)
            continue
        found.append(Row(variant["name"], row["spread"]["median_ms"], predicted_ms))
    return found


def table(found: Sequence[Row]) -> str:
    """Spell predictions as Markdown, with the largest error below."""
    lines = ["| variant | measured ms | predicted ms | error |", "|---|--:|--:|--:|"]
    lines += [
        f"| {row.name} | {row.measured_ms:.0f} | {row.predicted_ms:.0f} | {row.error:+.1%} |"
        for row in found
    ]
    worst = max(abs(row.error) for row in found)
    return "\n".join([*lines, "", f"Largest error {worst:.1%}, limit {LIMIT:.0%}"])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def main() -> int:
    """Print predicted, measured and error of every variant of a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", type=Path, metavar="FILE", help="what compare.py --json wrote")
    path = parser.parse_args().report
    try:
        found = rows(json.loads(path.read_text()))
    except (KeyError, OSError, StopIteration, TypeError, ValueError) as error:
        parser.error(f"{path}: {error!r}")
    print(table(found))
    return int(max(abs(row.error) for row in found) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
