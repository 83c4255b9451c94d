"""The planner's candidates: every split of a model that can run on a cluster."""

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Literal

from megatron.fold3d.plan.passes.pairs import num_pairs
from megatron.fold3d.plan.schedule_word import AUTO, STOCK, Part, Word, parts_of, spelled
from megatron.fold3d.plan.schedules import groups_of
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.layers import layers_of_stages
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.sharded_footprint import Shards
from megatron.fold3d.predict.cost_model.sizes import Recompute, Setup

Schedule = Literal["1f1b", "interleaved", "aiao"]
Assumption = Literal[
    "preemptive-comm",
    "offload",
    "delay-weight-grads",
    "recompute-layers",
    "recompute-early",
    "overlap-tensor-parallel",
]
Share = float | Literal["auto"]
MICROBATCH_SIZES = (1, 2, 4, 8)
MOST_SEGMENTS = 8
_CONTEXT_SIZES, _LEAST_PART = (2, 4, 8, 16), 8192  # tokens of a sequence that a rank has
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration of a training run."""

    schedule: str
    """A name of `plan.schedules.SCHEDULES`; the planner chooses among `Schedule`."""
    is_stock: bool
    """True if Megatron runs it without us."""
    setup: Setup
    num_ranks: int
    num_segments: int
    num_microbatches: int
    group_size: int | None = None
    """Micro-batches per group of ``interleaved``; all of them is breadth-first."""
    layers: tuple[int, ...] = ()
    """Layers of each stage; if empty, all have equally many."""
    backward_share: Share | None = None
    """Part of each segment's DP.sync that overlaps backwards; the rest overlaps the next forward.

    "auto" takes what fits, segment by segment. None ends all with the iteration, as stock does.
    """
    offload: bool = False
    preemptive: bool = False
    """True if PP.sync goes before DP.sync on a link."""
    delayed_weight_grads: tuple[int, ...] = ()
    """The segments whose weight gradients are apart from their backwards."""
    behind_backwards: tuple[int, ...] = ()
    """Of these, the ones that follow their own backwards, and between which DP.sync starts."""
    slices: bool | None = None
    """Whether DP.sync is cut into slices; None is where training does so by itself."""
    sums_last: bool = False
    """Whether all DP.sync starts behind all backwards: without ``--overlap-grad-reduce``."""
    reduces_early: bool = False
    """Whether DP.sync may start between weight gradients that are apart."""
    forwards_ahead: int | None = None
    """Per rank behind; None is the schedule's own."""
    shards: Shards = "off"
    """What replicas keep in shards between uses, with the distributed optimizer."""
    replicated: tuple[int, ...] = ()
    """The segments that every replica steps in full, with the distributed optimizer."""
    places_weight_grads: bool = False
    """Whether the weight gradients of all segments go where ranks would wait."""
    recompute_layers: tuple[int, ...] = ()
    """How many layers each stage recomputes; if empty, what `setup` says."""
    recompute_early: bool = False
    """Whether all stages recompute before their gradients arrive."""
    overlap_tensor_parallel: bool = False
    """Whether micro-batches run in pairs, each during the other's collectives."""

    @property
    def name(self) -> str:
        """The name of its schedule in tables."""
        one_group = self.group_size == self.num_microbatches
        order = "breadth-first" if one_group else self.schedule
        delayed = "+W" + spelled(self.delayed_weight_grads) if self.delayed_weight_grads else ""
        ahead = f"+F{self.forwards_ahead}" if self.forwards_ahead else ""
        whole = "+O" + spelled(self.replicated) if self.replicated else ""
        sharded = "" if self.shards == "off" else f"+{self.shards}"
        ours = (
            sharded
            + whole
            + "+offload" * self.offload
            + ahead
            + delayed
            + "+Wauto" * self.places_weight_grads
            + "+R" * self.recompute_early
            + "+pairs" * self.overlap_tensor_parallel
        )
        placed = "" if self.setup.order == "tp-dp-pp" else f" {self.setup.order}"
        return "stock " * self.is_stock + order + ours + placed

    @property
    def word(self) -> Word:
        """What ``--schedule`` takes for it; ``stock`` stands for Megatron's own flags."""
        if self.is_stock:
            return Word(STOCK)
        last = tuple(s for s in self.delayed_weight_grads if s not in self.behind_backwards)
        parts = [
            *parts_of("optimizer", [("replicated", self.replicated)]),
            *([] if self.backward_share is None else [Part("step", "next")]),
            *parts_of("wgrad", [("behind", self.behind_backwards), ("last", last)]),
            *([Part("wgrad", "gaps")] if self.places_weight_grads else []),
            *([Part("recompute", "early")] if self.recompute_early else []),
            *([] if self.forwards_ahead is None else [Part("ahead", str(self.forwards_ahead))]),
        ]
        if self.schedule == "interleaved" and self.group_size not in (None, self.num_ranks):
            parts.append(Part("group", str(self.group_size)))
        if self.backward_share not in (None, AUTO):
            parts.append(Part("share", str(self.backward_share)))
        if self.slices is not None:
            parts.append(Part("slices", "on" if self.slices else "off"))
        if self.overlap_tensor_parallel:
            parts.append(Part("pairs", "on"))
        return Word(self.schedule, tuple(parts))

    def most_activations(self, rank: int) -> int:
        """Return how many (segment, micro-batch) activations a rank's device holds at most."""
        if self.overlap_tensor_parallel:
            pairs = num_pairs(self.num_microbatches)
            unpaired = replace(self, num_microbatches=pairs, overlap_tensor_parallel=False)
            whole = self.num_segments * self.num_microbatches
            return min(whole, 2 * unpaired.most_activations(rank))
        ranks, segments, microbatches = self.num_ranks, self.num_segments, self.num_microbatches
        ahead = (self.forwards_ahead or 2) * (ranks - 1 - rank)
        if self.schedule == "1f1b":
            most = ranks - rank
        elif self.schedule == "interleaved":
            groups = groups_of(microbatches, self.group_size or ranks, ranks)
            most = ahead + (segments - 1) * max(map(len, groups)) + 1
        else:
            most = (segments - 1) * microbatches + min(microbatches, ahead + 1)
            if self.offload:  # what computes, what leaves, what comes back
                return min(most, 3)
        return min(most, segments * microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The choices that the user has made; None leaves one to the planner."""

    tensor_parallel: int | None = None
    data_parallel: int | None = None
    num_ranks: int | None = None
    num_segments: int | None = None
    microbatch_size: int | None = None
    recompute: Recompute | None = None
    fp32: bool = False
    context_parallel: int | None = 1
    expert_parallel: int | None = 1
    expert_tensor_parallel: int = 0
    small_gradients: bool = False
    accumulates_in_fp32: bool = False
    scatters_in_fp32: bool = False


FREE = Given()


def candidates(
    shape: ModelShape,
    cluster: Cluster,
    global_batch_size: int,
    given: Given = FREE,
    assumed: Set[Assumption] = frozenset(),
) -> Iterator[Candidate]:
    """Yield the candidates that divide the GPUs, the heads and the batch, without checking memory.

    Micro-batch groups are only the smallest and the largest, and layers are uneven only if they
    cannot be even: `neighbours` yields the values in between.
    """
    microbatch_sizes = _choices(MICROBATCH_SIZES, given.microbatch_size)
    recomputes = _choices(RECOMPUTES, given.recompute)
    for (t, p, c, dp), e, size, recompute in product(
        _splits(shape, cluster, given), _expert_sizes(shape, given), microbatch_sizes, recomputes
    ):
        if global_batch_size % (dp * size):
            continue
        setup = Setup(
            tensor_parallel=t,
            data_parallel=dp,
            microbatch_size=size,
            sequence_parallel=t > 1,
            recompute=recompute,
            fp32=given.fp32,
            context_parallel=c,
            expert_parallel=e,
            expert_tensor_parallel=given.expert_tensor_parallel,
            small_gradients=given.small_gradients,
            accumulates_in_fp32=given.accumulates_in_fp32,
            scatters_in_fp32=given.scatters_in_fp32,
        )
        if setup.num_replicas * t % prod(setup.expert_ranks):
            continue
        stock = Candidate(
            schedule="1f1b",
            is_stock=True,
            setup=setup,
            num_ranks=p,
            num_segments=1,
            num_microbatches=global_batch_size // (dp * size),
        )
        most = min(MOST_SEGMENTS, shape.num_layers // p) if p > 1 else 1
        for segments in _choices(range(1, most + 1), given.num_segments):
            yield from _of_segments(shape, stock, segments, assumed)


def _expert_sizes(shape: ModelShape, given: Given) -> list[int]:
    """Return how many ranks may share a layer's experts; more than a node has are across nodes."""
    if given.expert_parallel is not None:
        return [given.expert_parallel]
    return _divisors(shape.num_experts) or [1]


def _splits(
    shape: ModelShape, cluster: Cluster, given: Given
) -> Iterator[tuple[int, int, int, int]]:
    """The (tp, pp, cp, dp) sizes that divide the GPUs, the heads and the layers.

    A sequence is shared where each rank keeps a long part of it.
    """
    gpus = cluster.num_gpus
    tensor_sizes = _choices(_divisors(cluster.gpus_per_node), given.tensor_parallel)
    context_sizes = [1, *(c for c in _CONTEXT_SIZES if shape.seq_length >= c * _LEAST_PART)]
    if given.context_parallel is not None:
        context_sizes = [given.context_parallel]
    for t, p, c in product(tensor_sizes, _choices(_divisors(gpus), given.num_ranks), context_sizes):
        model = t * p * c
        if gpus % model or shape.num_groups % t or shape.num_layers < p:
            continue
        dp = gpus // model
        if given.data_parallel in (None, dp):
            yield t, p, c, dp


def _of_segments(
    shape: ModelShape, stock: Candidate, segments: int, assumed: Set[Assumption]
) -> Iterator[Candidate]:
    """Every schedule with this number of segments, without and with the distributed optimizer.

    With it, no candidate has only a backward share: all-gathers already fill the forwards, and
    deferred gradients would prolong them. `neighbours` adds shares with delayed weight gradients.
    """
    ranks, microbatches = stock.num_ranks, stock.num_microbatches
    if shape.num_layers < ranks * segments:
        return
    layers = layers_of_stages(shape.num_layers, ranks, segments)
    even = len(set(layers)) == 1
    if not even and shape.num_layers % ranks == 0 and segments > 1:
        return  # another number of segments splits the layers evenly over ranks
    first = replace(stock, num_segments=segments, layers=() if even else layers)
    orders = [first] if segments == 1 else []
    if segments > 1 and microbatches % ranks == 0:
        orders.append(replace(first, schedule="interleaved", group_size=ranks))
    if segments > 1 and microbatches > ranks:
        orders.append(replace(first, schedule="interleaved", group_size=microbatches))
    if ranks > 1:
        ours = replace(first, is_stock=False)
        orders.append(replace(ours, schedule="aiao"))
        if segments > 1 and microbatches > ranks:
            orders.append(replace(ours, schedule="interleaved", group_size=ranks))
        if segments > 1 and "offload" in assumed:
            orders.append(replace(ours, schedule="aiao", offload=True))
    sharded = replace(stock.setup, distributed_optimizer=True)
    for order in orders:
        yield order
        if stock.setup.num_replicas > 1:
            if not order.is_stock:
                yield replace(order, backward_share="auto")
            yield replace(order, setup=sharded)
        if "preemptive-comm" in assumed and not order.is_stock and _can_preempt(stock.setup):
            yield replace(order, preemptive=True)
            yield replace(order, preemptive=True, backward_share="auto")
            yield replace(order, preemptive=True, setup=sharded)


def _can_preempt(setup: Setup) -> bool:
    """True if there is DP.sync to interrupt, and streams may overtake each other.

    With tensor or context parallelism a search assumes Megatron's one hardware queue, with which
    the preemptive communicator cannot work.
    """
    return setup.num_replicas > 1 and setup.tensor_parallel == setup.context_parallel == 1


def _choices[T](all_: tuple[T, ...] | range | list[int], given: T | None) -> list[T]:
    return [choice for choice in all_ if given in (None, choice)]  # type: ignore[misc]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
