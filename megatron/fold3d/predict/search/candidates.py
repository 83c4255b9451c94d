"""The planner's candidates: every way to train a model on a cluster."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any, Literal, Self

from megatron.fold3d.observe.breakdown import Flops
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import GradSync, Job, Shards
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.passes.pairs import num_pairs
from megatron.fold3d.plan.schedule_word import STOCK
from megatron.fold3d.plan.schedules import FORWARDS_AHEAD, forwards_first, groups_of
from megatron.fold3d.policy.partition import layers_of_stages
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.estimate import Estimate, estimate
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.sizes import Recompute, Setup
from megatron.fold3d.predict.cost_model.training_flops import training_flops

Assumption = Literal[
    "preemptive-comm",
    "offload",
    "delay-weight-grads",
    "recompute-layers",
    "recompute-early",
    "overlap-tensor-parallel",
]
MICROBATCH_SIZES = (1, 2, 4, 8)
MOST_SEGMENTS = 8
_CONTEXT_SIZES, _LEAST_PART = (2, 4, 8, 16), 8192  # a rank keeps this many tokens of a sequence
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
FREE: Mapping[str, Any] = MappingProxyType({})  # the search chooses all sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration of a training run: its sizes, and its choice.

    The `Job` of a candidate follows from its choice and its training setup.

    Attributes:
        choice: how iterations run; for stock Megatron only the order counts.
        layers: the layers of each stage; if empty, all stages have equally many.
        recompute_layers: how many layers each stage recomputes; if empty, `setup` decides.
        preemptive: whether PP.sync goes before DP.sync on a link.
        shards: what replicas keep in shards between uses, with the distributed optimizer.
        combined: whether stock runs forwards as one with backwards, to hide experts' all-to-alls.
        aligned: whether all ranks of stock start the DP.sync of a chunk together, as by default.
        flags: the job that a run's flags give; None derives the job from the candidate.
    """

    choice: Choice
    setup: Setup
    num_ranks: int
    num_microbatches: int
    layers: tuple[int, ...] = ()
    recompute_layers: tuple[int, ...] = ()
    offload: bool = False
    preemptive: bool = False
    shards: Shards = "off"
    combined: bool = False
    aligned: bool = True
    flags: Job | None = field(default=None, compare=False)

    @property
    def is_stock(self) -> bool:
        """Whether its order is stock Megatron's."""
        return self.choice.order == STOCK

    @property
    def is_ours(self) -> bool:
        """Whether Megatron cannot run it without us."""
        return not self.is_stock or bool(self.setup.coding_flags)

    @property
    def layout(self) -> tuple[int, ...]:
        """All parallel sizes, and the micro-batch size: (tp, pp, cp, ep, dp, samples)."""
        s = self.setup
        model = s.tensor_parallel, self.num_ranks, s.context_parallel, s.expert_parallel
        return (*model, s.data_parallel, s.microbatch_size)

    @property
    def schedule(self) -> str:
        """The schedule: a name of `plan.schedules.SCHEDULES`."""
        return self.choice.schedule

    @property
    def num_segments(self) -> int:
        """Model chunks of a rank."""
        return len(self.choice.segments)

    @property
    def group(self) -> int:
        """Micro-batches that pass a segment before the next one's turn."""
        if self.schedule != "interleaved":
            return self.num_microbatches
        each = 2 if self.choice.pairs else 1
        return min(self.num_microbatches, self.choice.group or each * self.num_ranks)

    @property
    def job(self) -> Job:
        """The job from which the plan of an iteration is made.

        Stock's 1F1B starts DP.sync in the last backward, by DDP's hooks, or after it.
        """
        if self.flags is not None:
            return replace(self.flags, choice=self.choice, num_microbatches=self.num_microbatches)
        choice, sharded = self.choice, self.setup.distributed_optimizer
        of_stock: GradSync = "aligned" if self.aligned else "overlap"
        of_stock = "serial" if self.schedule == "1f1b" else of_stock
        return Job(
            choice=choice,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            steps_shards=sharded,
            gathers_params=sharded,
            shards=self.shards,
            grad_sync=of_stock if self.is_stock else "overlap",
            reduces_early=bool(choice.where(wgrad="behind")),
            parameter_share=self.setup.element_bytes / self.setup.gradient_bytes,
            offload=OffloadChoice() if self.offload else None,
            combined=self.combined,
        )

    def changed(self, segments: Iterable[int] | None = None, **state: str) -> Self:
        """Return the candidate with other values for some segments: see `Choice.changed`."""
        return replace(self, choice=self.choice.changed(segments, **state))

    def with_options(self, **options: Any) -> Self:
        """Return the candidate with other options of its choice: ``with_options(ahead=1)``."""
        return replace(self, choice=replace(self.choice, **options))

    @property
    def name(self) -> str:
        """The candidate's name in tables: the value of ``--schedule``, and further flags."""
        name, group = str(self.choice), self.choice.group
        if self.is_stock:
            in_groups = f":group={group}" if group else ""
            one_group = group == self.num_microbatches
            name = "stock breadth-first" if one_group else f"stock {self.schedule}{in_groups}"
            name += " --overlap-moe-expert-parallel-comm" if self.combined else ""
            name += "" if self.aligned else " --no-align-grad-reduce"
            if (instances := self.setup.optimizer_instances) > 1:
                name += f" --num-distributed-optimizer-instances {instances}"
        shards = f" --shard-segments {self.shards}" if self.shards != "off" else ""
        copies = " --offload-activations on" if self.offload else ""
        preempts = " --preemptive-comm" if self.preemptive else ""
        codes = "".join(f" {flag}" for flag in self.setup.coding_flags)
        placed = "" if self.setup.order == "tp-dp-pp" else f" {self.setup.order}"
        return name + shards + copies + preempts + codes + placed

    def most_activations(self, rank: int) -> int:
        """Return the most (segment, micro-batch) activations that a rank's device holds at once."""
        if self.choice.pairs:
            group = self.choice.group and num_pairs(self.choice.group)
            unpaired = replace(
                self.with_options(pairs=None, group=group),
                num_microbatches=num_pairs(self.num_microbatches),
            )
            whole = self.num_segments * self.num_microbatches
            return min(whole, 2 * unpaired.most_activations(rank))
        ranks, segments, microbatches = self.num_ranks, self.num_segments, self.num_microbatches
        if self.offload:  # one computes, one is copied to the host, one is copied back
            return min(3, segments * microbatches)
        groups = groups_of(microbatches, self.group, ranks)
        ahead = (self.choice.ahead or FORWARDS_AHEAD.get(self.schedule, 2)) * (ranks - 1 - rank)
        most = forwards_first(groups, segments, ahead) + 1 + self.combined
        return min(most, segments * microbatches)


def estimate_of(
    shape: ModelShape,
    cluster: Cluster,
    candidate: Candidate,
    of_sizes: Callable[..., Estimate] = estimate,
) -> Estimate:
    """Return the estimate of a candidate.

    Args:
        of_sizes: `estimate`, or a cached version of it.
    """
    c = candidate
    return of_sizes(
        shape,
        cluster,
        c.setup,
        num_ranks=c.num_ranks,
        num_segments=c.num_segments,
        layers=c.layers,
        recompute_layers=c.recompute_layers,
        replicated=c.choice.stages(c.num_ranks, optimizer="replicated"),
    )


def flops_of(
    shape: ModelShape, cluster: Cluster, candidate: Candidate, iteration_s: float
) -> Flops:
    """Return the FLOP/s of a GPU while a candidate trains."""
    c, setup = candidate, candidate.setup
    split = c.layers or c.num_ranks * c.num_segments
    each = training_flops(shape, setup.recompute, split, c.recompute_layers)
    batch = setup.microbatch_size * setup.data_parallel * c.num_microbatches
    return each.times(batch / iteration_s / cluster.num_gpus)


def candidates(
    shape: ModelShape,
    cluster: Cluster,
    global_batch_size: int,
    given: Mapping[str, Any] = FREE,
    assumed: Set[Assumption] = frozenset(),
) -> Iterator[Candidate]:
    """Yield the candidates that divide the GPUs, the heads and the batch, without checking memory.

    Micro-batch groups are only the smallest and the largest, and layers are uneven only if they
    cannot be even: `neighbours` yields the values in between.

    Args:
        given: fixed values of ``num_ranks``, ``num_segments`` and fields of `Setup`. Precision and
            expert tensor parallelism are never searched; by default they are `Setup`'s.
    """
    microbatch_sizes = _choices(MICROBATCH_SIZES, given.get("microbatch_size"))
    # Attention that keeps no scores always recomputes them.
    recomputes = RECOMPUTES if given.get("keeps_scores") else RECOMPUTES[1:]
    if "recompute" in given:
        recomputes = (given["recompute"],)
    # Ranks that share a layer's experts; they may be on several nodes.
    expert_sizes = _divisors(shape.num_experts) or [1]
    if "expert_parallel" in given:
        expert_sizes = [given["expert_parallel"]]
    rest = {name: given[name] for name in given if name not in ("num_ranks", "num_segments")}
    for (t, p, c, dp), e, size, recompute in product(
        _splits(shape, cluster, given), expert_sizes, microbatch_sizes, recomputes
    ):
        if global_batch_size % (dp * size):
            continue
        chosen: dict[str, Any] = {
            "tensor_parallel": t,
            "data_parallel": dp,
            "microbatch_size": size,
            "sequence_parallel": t > 1,
            "recompute": recompute,
            "context_parallel": c,
            "expert_parallel": e,
        }
        setup = Setup(**(rest | chosen))
        if setup.num_replicas * t % prod(setup.expert_ranks):
            continue
        stock = Candidate(
            choice=Choice.plain(STOCK, 1),
            setup=setup,
            num_ranks=p,
            num_microbatches=global_batch_size // (dp * size),
        )
        most = min(MOST_SEGMENTS, shape.num_layers // p) if p > 1 else 1
        for segments in _choices(range(1, most + 1), given.get("num_segments")):
            yield from _of_segments(shape, stock, segments, assumed)


def _splits(
    shape: ModelShape, cluster: Cluster, given: Mapping[str, Any]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the sizes (tp, pp, cp, dp) that divide the GPUs, the heads and the layers.

    Context parallelism leaves at least `_LEAST_PART` tokens of a sequence to each rank.
    """
    gpus = cluster.num_gpus
    tensor_sizes = _choices(_divisors(cluster.gpus_per_node), given.get("tensor_parallel"))
    rank_counts = _choices(_divisors(gpus), given.get("num_ranks"))
    context_sizes = [1, *(c for c in _CONTEXT_SIZES if shape.seq_length >= c * _LEAST_PART)]
    if "context_parallel" in given:
        context_sizes = [given["context_parallel"]]
    for t, p, c in product(tensor_sizes, rank_counts, context_sizes):
        model = t * p * c
        if gpus % model or shape.num_groups % t or shape.num_layers < p:
            continue
        dp = gpus // model
        if given.get("data_parallel") in (None, dp):
            yield t, p, c, dp


def _of_segments(
    shape: ModelShape, stock: Candidate, segments: int, assumed: Set[Assumption]
) -> Iterator[Candidate]:
    """Yield every schedule with this number of segments, with and without distributed optimizer.

    With the distributed optimizer no gradients are deferred: all-gathers already fill the forwards,
    which deferred sums would prolong. `neighbours` defers them where weight gradients are delayed.
    """
    ranks, microbatches = stock.num_ranks, stock.num_microbatches
    if shape.num_layers < ranks * segments:
        return
    layers = layers_of_stages(shape.num_layers, ranks, segments)
    even = len(set(layers)) == 1
    if not even and shape.num_layers % ranks == 0 and segments > 1:
        return  # another number of segments splits the layers evenly over ranks
    plain = Choice.plain(STOCK, segments)
    in_groups = segments > 1 and microbatches > ranks
    choices = [plain] if segments == 1 or microbatches % ranks == 0 else []
    if in_groups:
        sizes = group_sizes(ranks, microbatches)
        ends = sizes[-1:] if choices else dict.fromkeys((sizes[0], sizes[-1]))
        choices += (replace(plain, group=size) for size in ends)
    if ranks > 1:
        choices.append(Choice.plain("aiao", segments))
        if in_groups:
            choices.append(Choice.plain("interleaved", segments))
    layers = () if even else layers
    orders = [replace(stock, choice=choice, layers=layers) for choice in choices]
    if ranks > 1 and segments > 1 and "offload" in assumed:
        aiao = Choice.plain("aiao", segments)
        orders.append(replace(stock, choice=aiao, layers=layers, offload=True))
    setup = stock.setup
    if setup.expert_parallel > 1 and not setup.fp32 and setup.recompute != "full":
        apart = segments > 1 or ranks == 1  # Megatron demands one of these
        orders += [replace(order, combined=True) for order in orders if order.is_stock and apart]
    sharded = replace(setup, distributed_optimizer=True)
    # Preemption needs DP.sync to interrupt, and several hardware queues: with tensor or context
    # parallelism a search assumes the one queue that Megatron demands.
    may_preempt = "preemptive-comm" in assumed and setup.most_replicas > 1
    may_preempt &= setup.tensor_parallel == setup.context_parallel == 1
    for order in orders:
        preempts = may_preempt and not order.is_stock
        for each in (order, replace(order, preemptive=True))[: 1 + preempts]:
            yield each
            if setup.most_replicas > 1:
                if not each.is_stock:
                    yield each.changed(step="next")
                yield replace(each, setup=sharded)


def group_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Return sizes of groups of micro-batches that stock runs, from the smallest to all of them.

    A size divides the micro-batches. If the ranks do not, a size may also leave a smaller last
    group, in which Megatron demands a micro-batch for each rank.
    """

    def may_be(size: int) -> bool:
        groups, rest = -(-num_microbatches // size), num_microbatches % size
        is_most_even = size == -(-num_microbatches // groups)
        return not rest or (num_microbatches % num_ranks > 0 and rest >= num_ranks and is_most_even)

    return [size for size in range(num_ranks, num_microbatches + 1) if may_be(size)]


def _choices[T](all_: Iterable[T], given: T | None) -> list[T]:
    return [choice for choice in all_ if given in (None, choice)]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
