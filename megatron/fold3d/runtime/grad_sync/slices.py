"""A model chunk's gradients, cut into slices; one collective reduces each.

Keeps one invariant: the cut depends only on the plan, the sizes of parameters, the share and the
size of a slice, so all replicas of a chunk make the same slices.
"""

import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist

from megatron.fold3d.policy.shard_order import in_shards
from megatron.fold3d.runtime.device import Launched


class Transfer(Launched, Protocol):
    """Communication that has been started, such as a `dist.Work`."""

    def wait(self) -> object:
        """Wait for its result, which is then valid on the current stream."""


class Piece(Protocol):
    """Gradients that are reduced together, such as a `Slice` or a `ShardedSlice`."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that reduces it."""

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """The views of the gradient buffer that it consists of.

        Each is ``[num_elements of the view]``, contiguous, in the dtype in which DDP reduces. DDP
        owns the memory.
        """

    @property
    def num_elements(self) -> int:
        """The number of gradients."""

    @property
    def num_bytes(self) -> int:
        """The size of the views in bytes."""

    def reduce(self) -> Transfer:
        """Start to reduce it in place, asynchronously, and return the work.

        The views must be complete on the current stream. The result is valid on the stream that is
        current when the caller waits for the work.
        """

    def cut(self, size: int) -> tuple[Self, Self]:
        """Split into the first ``size`` elements and the remaining ones; both stay views."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A contiguous 1-D view of a bucket's gradient buffer, with its reduce op and process group.

    Attributes:
        data: ``[num_elements]``, in the dtype in which DDP reduces; owned by DDP. Complete on the
            stream that was current when the slice was made.
        op: the reduce op, sum or average.
        group: the ranks that reduce it together.
        owner: the only rank of the group that needs the sum, and gets it; None is all of them.
    """

    data: torch.Tensor
    op: Any
    group: dist.ProcessGroup
    owner: int | None = None

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """The view alone."""
        return (self.data,)

    @property
    def num_elements(self) -> int:
        """The number of gradients."""
        return self.data.numel()

    @property
    def num_bytes(self) -> int:
        """The size of the view in bytes."""
        return self.data.numel() * self.data.element_size()

    def reduce(self) -> dist.Work:
        """Start to reduce the view in place, asynchronously; see `Piece.reduce`."""
        work: dist.Work | None
        if self.owner is None:
            work = dist.all_reduce(self.data, self.op, group=self.group, async_op=True)
        else:
            work = dist.reduce(
                self.data, group_dst=self.owner, op=self.op, group=self.group, async_op=True
            )
        assert work is not None
        return work

    def cut(self, size: int) -> tuple["Slice", "Slice"]:
        """Split into the first ``size`` elements and the remaining ones; both stay views."""
        return replace(self, data=self.data[:size]), replace(self, data=self.data[size:])


@dataclass(frozen=True, slots=True)
class ShardedSlice:
    """As many gradients of each shard, wherever they lie in it, which a reduce-scatter sums.

    What other shards hold afterwards is undefined, as after a reduce-scatter of a whole bucket.

    Attributes:
        shards: views ``[num_elements of the view]`` of a bucket, by shard; those of each shard are
            together equally large.
        op: the reduce op.
        group: the replicas, of which each owns a shard.
        bucket: the bucket's gradients, if the slice is all of them, in their order.
    """

    shards: tuple[tuple[torch.Tensor, ...], ...]
    op: Any
    group: dist.ProcessGroup
    bucket: torch.Tensor | None = None

    @classmethod
    def of(
        cls, data: torch.Tensor, begin: int, end: int, op: Any, group: dist.ProcessGroup, size: int
    ) -> "ShardedSlice":
        """Return the same part, from ``begin`` to ``end``, of every one of ``size`` shards."""
        shards = data.chunk(size)
        is_whole = (end - begin) * size == data.numel()
        parts = tuple((shard[begin:end],) for shard in shards)
        return cls(parts, op, group, data if is_whole else None)

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """The views ``[num_elements of the view]``, by shard."""
        return tuple(chain.from_iterable(self.shards))

    @property
    def num_elements(self) -> int:
        """The number of gradients, in all shards together."""
        return sum(data.numel() for data in self.views)

    @property
    def num_bytes(self) -> int:
        """The size of all views in bytes."""
        return sum(data.nbytes for data in self.views)

    def reduce(self) -> Transfer:
        """Start a reduce-scatter into the own shard; see `Piece.reduce`.

        Its input has to be contiguous: if the slice is not a whole bucket, its views are copied.
        """
        return _Scatter(self)

    def cut(self, size: int) -> tuple["ShardedSlice", "ShardedSlice"]:
        """Split every shard at the same size; the first parts have at most ``size`` elements."""
        nothing = ShardedSlice(((),) * len(self.shards), self.op, self.group)
        if size >= self.num_elements:
            return self, nothing
        if size < len(self.shards):
            return nothing, self
        both = [first_of(shard, size // len(self.shards)) for shard in self.shards]
        first, rest = (
            ShardedSlice(shards, self.op, self.group) for shards in zip(*both, strict=True)
        )
        return first, rest


class _Scatter:
    """The reduce-scatter of a slice under way."""

    def __init__(self, scattered: ShardedSlice) -> None:
        group = scattered.group
        self._own = scattered.shards[group.rank()]
        whole = scattered.bucket
        self._together = torch.cat(scattered.views) if whole is None else whole  # kept while read
        sums = self._own[0]
        if len(self._own) > 1:
            sums = self._together.new_empty(self._together.numel() // group.size())
        self._sums = sums
        work: dist.Work | None = dist.reduce_scatter_tensor(
            sums, self._together, scattered.op, group=group, async_op=True
        )
        assert work is not None
        self._work = work

    def get_future(self) -> Any:
        """Return a future that is done when the sums are there."""
        return self._work.get_future()

    def is_completed(self) -> bool:
        """Return True if the sums are there."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Wait for the sums, and put them where they belong in the own shard."""
        self._work.wait()
        if len(self._own) > 1:
            sizes = [data.numel() for data in self._own]
            for data, sums in zip(self._own, self._sums.split(sizes), strict=True):
                data.copy_(sums)


def first_of(
    views: Sequence[torch.Tensor], size: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Split views ``[num_elements of the view]`` into the first ``size`` elements and the rest."""
    first: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for data in views:
        first += [data[:size]] if size else []
        rest += [data[size:]] if data.numel() > size else []
        size -= min(size, data.numel())
    return tuple(first), tuple(rest)


def reduce_op(bucket_group: Any) -> Any:
    """Return the reduce op of DDP's collectives, sum or average."""
    average = bucket_group.ddp_config.average_in_collective
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM


def ranges_of(bucket: Any, parameters: Container[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the sorted ``(begin, end)`` ranges of some parameters, of any shape, in a bucket."""
    return sorted(bucket.param_to_index[p] for p in bucket.params if p in parameters)


def slices(
    bucket: Any,
    reduced_in_iteration: Container[torch.nn.Parameter],
    slice_bytes: int,
    first: int = 0,
    last: int = sys.maxsize,
) -> Iterator[torch.Tensor]:
    """Yield 1-D views of a bucket's other gradients from offset ``first`` to ``last``.

    The views are contiguous, in order, at most ``slice_bytes`` large, and of the bucket's own
    buffer, which DDP owns.
    """
    data = bucket.grad_data
    for begin, end in outside(ranges_of(bucket, reduced_in_iteration), data.numel()):
        here = data[max(begin, first) : min(end, last)]
        if here.numel():
            yield from here.split(slice_bytes // data.element_size())


def in_iteration_offsets(
    bucket: Any, reduced_in_iteration: Container[torch.nn.Parameter], num_shards: int
) -> list[tuple[int, int]]:
    """Return the sorted ``(begin, end)`` parts of a shard with `ranges_of` of any shard.

    A reduce-scatter sums the same part of every shard, so a part counts if any shard needs it.
    """
    size = bucket.grad_data.numel() // num_shards
    parts = sorted(
        (first - shard * size, last - shard * size)
        for begin, end in ranges_of(bucket, reduced_in_iteration)
        for shard, first, last in in_shards(begin, end, size)
    )
    return list(_merged(parts))


def outside(ranges: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Yield the ``(begin, end)`` parts of ``size`` elements outside of all sorted ranges."""
    edges = [0, *chain.from_iterable(ranges), size]
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        if begin < end:
            yield begin, end


def split_after(whole: Sequence[Piece], left: int) -> tuple[list[Piece], list[Piece]]:
    """Split slices into the first ``left`` elements, counted together, and the rest."""
    first: list[Piece] = []
    rest: list[Piece] = []
    for part in whole:
        ours, others = part.cut(left)
        left -= ours.num_elements
        first += [ours] if ours.num_elements else []
        rest += [others] if others.num_elements else []
    return first, rest


def _merged(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield sorted ranges, with those merged that overlap or touch."""
    begun: tuple[int, int] | None = None
    for begin, end in ranges:
        if begun is not None and begin <= begun[1]:
            begun = begun[0], max(begun[1], end)
            continue
        if begun is not None:
            yield begun
        begun = begin, end
    if begun is not None:
        yield begun
