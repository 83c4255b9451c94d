"""What the planner chooses from: every way to split a model that can run on a cluster at all."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from megatron.fold3d.analysis.cluster import Cluster
from megatron.fold3d.analysis.grad_sync import deferred_grad_sync
from megatron.fold3d.analysis.model import ModelShape
from megatron.fold3d.analysis.sizes import Recompute, Setup
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.lowering import add_grad_sync, add_offload
from megatron.fold3d.plan.schedules import build

Schedule = Literal["1f1b", "interleaved", "aiao"]
MICROBATCH_SIZES = (1, 2, 4, 8)
MOST_SEGMENTS = 8
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration of a training run."""

    schedule: Schedule
    setup: Setup
    num_ranks: int
    num_segments: int
    num_microbatches: int
    offload: bool = False

    @property
    def is_stock(self) -> bool:
        """Whether Megatron runs it without us."""
        return self.schedule != "aiao"

    def plan(self) -> Plan:
        """Return the plan: stock overlaps DP.sync in one iteration, AIAO reaches into the next."""
        compute = build(
            self.schedule,
            num_ranks=self.num_ranks,
            num_segments=self.num_segments,
            num_microbatches=self.num_microbatches,
        )
        if self.is_stock:
            return add_grad_sync(compute)
        return deferred_grad_sync(add_offload(compute) if self.offload else compute)

    def most_activations(self, rank: int) -> int:
        """Return how many (segment, micro-batch) activations a rank's device holds at most."""
        ranks, segments, microbatches = self.num_ranks, self.num_segments, self.num_microbatches
        ahead = 2 * (ranks - 1 - rank)
        if self.schedule == "1f1b":
            most = ranks - rank
        elif self.schedule == "interleaved":
            most = ahead + (segments - 1) * ranks + 1
        else:
            most = (segments - 1) * microbatches + min(microbatches, ahead + 1)
            if self.offload:  # what computes, what leaves, what comes back
                return min(most, 3)
        return min(most, segments * microbatches)

    def flags(self) -> str:
        """Return the flags of ``pretrain_gpt.py``; there is none for `offload` yet."""
        setup = self.setup
        words = [
            f"--tensor-model-parallel-size {setup.tensor_parallel}",
            f"--pipeline-model-parallel-size {self.num_ranks}",
            f"--micro-batch-size {setup.microbatch_size}",
            f"--global-batch-size "
            f"{setup.microbatch_size * setup.data_parallel * self.num_microbatches}",
        ]
        if setup.sequence_parallel:
            words.append("--sequence-parallel")
        if setup.recompute == "selective":
            words.append("--recompute-activations")
        elif setup.recompute == "full":
            words.append(
                "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
            )
        if self.is_stock and self.num_segments > 1:
            words.append(f"--num-virtual-stages-per-pipeline-rank {self.num_segments}")
        if not self.is_stock:
            words.append(f"--schedule aiao --segments {self.num_segments}")
        if setup.data_parallel > 1:  # or no DP.sync starts before the last backward
            words.append("--overlap-grad-reduce")
        if self.schedule == "interleaved":  # or it hides transfers in its steady state only
            words.append("--overlap-p2p-communication-warmup-flush")
        return " ".join(words)


def candidates(shape: ModelShape, cluster: Cluster, global_batch_size: int) -> Iterator[Candidate]:
    """Yield what divides evenly: GPUs, layers, heads and the batch; memory is not looked at."""
    gpus = cluster.num_gpus
    for t, p in product(_divisors(cluster.gpus_per_node), _divisors(gpus)):
        if gpus % (t * p) or shape.num_attention_heads % t or shape.num_layers % p:
            continue
        dp = gpus // (t * p)
        for size, recompute in product(MICROBATCH_SIZES, RECOMPUTES):
            if global_batch_size % (dp * size):
                continue
            setup = Setup(
                tensor_parallel=t,
                data_parallel=dp,
                microbatch_size=size,
                sequence_parallel=t > 1,
                recompute=recompute,
            )
            yield from _schedules(shape, setup, p, global_batch_size // (dp * size))


def _schedules(
    shape: ModelShape, setup: Setup, num_ranks: int, num_microbatches: int
) -> Iterator[Candidate]:
    stock = Candidate(
        schedule="1f1b",
        setup=setup,
        num_ranks=num_ranks,
        num_segments=1,
        num_microbatches=num_microbatches,
    )
    yield stock
    for segments in _divisors(shape.num_layers // num_ranks):
        if 1 < segments <= MOST_SEGMENTS:
            looped = replace(stock, schedule="aiao", num_segments=segments)
            yield looped
            yield replace(looped, offload=True)
            if num_ranks > 1 and num_microbatches % num_ranks == 0:
                yield replace(looped, schedule="interleaved")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
