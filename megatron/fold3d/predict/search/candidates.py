"""What the planner chooses from: every way to split a model that can run on a cluster at all."""

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.layers import layers_of_stages
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.sizes import Recompute, Setup

Schedule = Literal["1f1b", "interleaved", "aiao"]
Assumption = Literal["preemptive-comm", "offload", "delay-weight-grads"]
Share = float | Literal["auto"]
MICROBATCH_SIZES = (1, 2, 4, 8)
MOST_SEGMENTS = 8
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration of a training run."""

    schedule: Schedule
    is_stock: bool
    """Whether Megatron runs it without us."""
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
    """Whether PP.sync goes before DP.sync on a link."""
    delayed_weight_grads: tuple[int, ...] = ()
    """The segments whose weight gradients are computed after all backwards."""

    @property
    def name(self) -> str:
        """What tables call its schedule."""
        one_group = self.group_size == self.num_microbatches
        order = "breadth-first" if one_group else self.schedule
        delayed = "+W" + self.delayed_segments if self.delayed_weight_grads else ""
        return "stock " * self.is_stock + order + "+offload" * self.offload + delayed

    @property
    def delayed_segments(self) -> str:
        """The segments whose weight gradients are delayed, as the flag has them."""
        return ",".join(map(str, self.delayed_weight_grads))

    def most_activations(self, rank: int) -> int:
        """Return how many (segment, micro-batch) activations a rank's device holds at most."""
        ranks, segments, microbatches = self.num_ranks, self.num_segments, self.num_microbatches
        ahead = 2 * (ranks - 1 - rank)
        if self.schedule == "1f1b":
            most = ranks - rank
        elif self.schedule == "interleaved":
            most = ahead + (segments - 1) * (self.group_size or ranks) + 1
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


FREE = Given()


def candidates(
    shape: ModelShape,
    cluster: Cluster,
    global_batch_size: int,
    given: Given = FREE,
    assumed: Set[Assumption] = frozenset(),
) -> Iterator[Candidate]:
    """Yield the candidates that divide the GPUs, the heads and the batch, whatever their memory.

    Micro-batch groups are the smallest and the largest only, and layers are uneven only where they
    cannot be even: `neighbours` has what is in between.
    """
    microbatch_sizes = _choices(MICROBATCH_SIZES, given.microbatch_size)
    recomputes = _choices(RECOMPUTES, given.recompute)
    for (t, p, dp), size, recompute in product(
        _splits(shape, cluster, given), microbatch_sizes, recomputes
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
        )
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


def _splits(shape: ModelShape, cluster: Cluster, given: Given) -> Iterator[tuple[int, int, int]]:
    """The (tp, pp, dp) sizes that divide the GPUs, the heads and the layers."""
    gpus = cluster.num_gpus
    tensor_sizes = _choices(_divisors(cluster.gpus_per_node), given.tensor_parallel)
    for t, p in product(tensor_sizes, _choices(_divisors(gpus), given.num_ranks)):
        if gpus % (t * p) or shape.num_attention_heads % t or shape.num_layers < p:
            continue
        dp = gpus // (t * p)
        if given.data_parallel in (None, dp):
            yield t, p, dp


def _of_segments(
    shape: ModelShape, stock: Candidate, segments: int, assumed: Set[Assumption]
) -> Iterator[Candidate]:
    """Every schedule with this number of segments, without and with the distributed optimizer."""
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
        if stock.setup.data_parallel > 1:
            if not order.is_stock:
                yield replace(order, backward_share="auto")
            yield replace(order, setup=sharded)
        if "preemptive-comm" in assumed and not order.is_stock and _can_preempt(stock.setup):
            yield replace(order, preemptive=True)
            yield replace(order, preemptive=True, backward_share="auto")
            yield replace(order, preemptive=True, setup=sharded)


def _can_preempt(setup: Setup) -> bool:
    """Whether there is DP.sync to interrupt, and Megatron lets streams overtake each other.

    With tensor parallelism on GPUs before Blackwell it asserts CUDA_DEVICE_MAX_CONNECTIONS=1, with
    which the preemptive communicator cannot work.
    """
    return setup.data_parallel > 1 and setup.tensor_parallel == 1


def _choices[T](all_: tuple[T, ...] | range | list[int], given: T | None) -> list[T]:
    return [choice for choice in all_ if given in (None, choice)]  # type: ignore[misc]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
