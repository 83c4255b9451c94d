"""A model chunk's gradients, cut into slices; one collective reduces each.

Keeps one invariant: the cut depends only on the plan, the sizes of parameters, the share and the
size of a slice, so all replicas of a chunk make the same slices.
"""

import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    """

    data: torch.Tensor
    op: Any
    group: dist.ProcessGroup

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
        """Start an asynchronous in-place all-reduce of the view and return its work.

        The result is valid on the stream that is current when the caller waits for the work.
        """
        work: dist.Work | None = dist.all_reduce(
            self.data, self.op, group=self.group, async_op=True
        )
        assert work is not None
        return work

    def cut(self, size: int) -> tuple["Slice", "Slice"]:
        """Split into the first ``size`` elements and the remaining ones; both stay views."""
        return (
            Slice(self.data[:size], self.op, self.group),
            Slice(self.data[size:], self.op, self.group),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedSlice:
    """The same part of every replica's shard of a bucket, which a reduce-scatter sums.

    Attributes:
        data: the bucket's whole gradient buffer, ``[size * shard]`` in the dtype in which DDP
            reduces: one shard per rank of the group. DDP owns it.
        begin: where the part begins in each shard.
        end: where it ends.
        op: the reduce op.
        group: the process group.
        rank: this rank's place in it; its own shard receives the sums.
        size: the number of its ranks.
    """

    data: torch.Tensor
    begin: int
    end: int
    op: Any
    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """The part of each shard, by rank."""
        return tuple(shard[self.begin : self.end] for shard in self.data.chunk(self.size))

    @property
    def num_elements(self) -> int:
        """The number of gradients, in all shards together."""
        return (self.end - self.begin) * self.size

    @property
    def num_bytes(self) -> int:
        """The size of all views in bytes."""
        return self.num_elements * self.data.element_size()

    def reduce(self) -> dist.Work:
        """Start an asynchronous reduce-scatter into the own shard, and return its work.

        The input of a reduce-scatter has to be contiguous. If a slice is not a whole bucket, its
        views are copied; the copy lives until the reduction has ended.
        """
        work: dist.Work | None = dist.reduce_scatter_tensor(
            self.views[self.rank], self._together(), self.op, group=self.group, async_op=True
        )
        assert work is not None
        return work

    def cut(self, size: int) -> tuple["ShardedSlice", "ShardedSlice"]:
        """Split every shard at the same offset; the first parts have at most ``size`` elements."""
        middle = self.begin + min(size // self.size, self.end - self.begin)
        return self._of(self.begin, middle), self._of(middle, self.end)

    def _of(self, begin: int, end: int) -> "ShardedSlice":
        return ShardedSlice(
            data=self.data,
            begin=begin,
            end=end,
            op=self.op,
            group=self.group,
            rank=self.rank,
            size=self.size,
        )

    def _together(self) -> torch.Tensor:
        is_whole = self.num_elements == self.data.numel()
        return self.data if is_whole else torch.cat(self.views)


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
