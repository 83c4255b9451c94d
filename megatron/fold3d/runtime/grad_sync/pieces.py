"""Pieces of a model chunk's gradients, cut out of buckets; one collective sums each."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer

from megatron.fold3d.policy.shard_order import in_shards
from megatron.fold3d.runtime.device import Launched


@dataclass(frozen=True, slots=True)
class Piece:
    """Gradients that one collective sums in place: an all-reduce, a reduce or a reduce-scatter.

    What a rank holds afterwards of a sum that it does not need is undefined.

    Attributes:
        shards: views of a bucket's gradient buffer, by shard. Each is ``[num_elements of the
            view]``, contiguous, in the dtype in which DDP reduces; DDP owns the memory. Those of
            each shard of a reduce-scatter are together equally large. Other collectives have one
            shard, of one view.
        owner: the only rank of the group that needs the sum, and gets it; None is all of them.
        scatters: whether each rank of the group needs the sum of its shard alone.
        bucket: the bucket's gradients, if the piece is all of them, in their order.
    """

    shards: tuple[tuple[torch.Tensor, ...], ...]
    op: Any
    group: dist.ProcessGroup
    owner: int | None = None
    scatters: bool = False
    bucket: torch.Tensor | None = None

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """The views, by shard."""
        return tuple(chain.from_iterable(self.shards))

    @property
    def num_elements(self) -> int:
        """The number of gradients, in all shards together."""
        return sum(data.numel() for data in self.views)

    @property
    def num_bytes(self) -> int:
        """The size of all views in bytes."""
        return sum(data.nbytes for data in self.views)

    def reduce(self) -> Launched:
        """Start to reduce it in place, asynchronously, and return the work.

        The views must be complete on the current stream. The result is valid on the stream that is
        current when the caller waits for the work. The input of a reduce-scatter has to be
        contiguous: if the piece is not a whole bucket, its views are copied.
        """
        if self.scatters:
            return _Scatter(self)
        (data,) = self.views
        work: dist.Work | None
        if self.owner is None:
            work = dist.all_reduce(data, self.op, group=self.group, async_op=True)
        else:
            work = dist.reduce(
                data, group_dst=self.owner, op=self.op, group=self.group, async_op=True
            )
        assert work is not None
        return work

    def cut(self, size: int) -> tuple["Piece", "Piece"]:
        """Split every shard at the same size; the first piece has at most ``size`` elements."""
        nothing = replace(self, shards=((),) * len(self.shards), bucket=None)
        if size >= self.num_elements:
            return self, nothing
        if size < len(self.shards):
            return nothing, self
        size //= len(self.shards)
        both = [_split(shard, size, _cut_view, torch.numel) for shard in self.shards]
        first = tuple(tuple(ours) for ours, _ in both)
        rest = tuple(tuple(others) for _, others in both)
        return replace(nothing, shards=first), replace(nothing, shards=rest)


class _Scatter:
    """The reduce-scatter of a piece under way."""

    def __init__(self, piece: Piece) -> None:
        group = piece.group
        self._own = piece.shards[group.rank()]
        whole = piece.bucket
        self._together = torch.cat(piece.views) if whole is None else whole  # kept while read
        sums = self._own[0]
        if len(self._own) > 1:
            sums = self._together.new_empty(self._together.numel() // group.size())
        self._sums = sums
        scatter: Any = param_and_grad_buffer.dist_reduce_scatter_func  # DDP's own
        self._sum = scatter(sums, self._together, op=piece.op, group=group, async_op=True)
        self._work: dist.Work = getattr(self._sum, "all_to_all_handle", self._sum)

    def get_future(self) -> Any:
        """Return a future that is done when the sums are there."""
        return self._work.get_future()

    def is_completed(self) -> bool:
        """Return True if the sums are there."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Wait for the sums, and put them where they belong in the own shard."""
        self._sum.wait()
        if len(self._own) > 1:
            sizes = [data.numel() for data in self._own]
            for data, sums in zip(self._own, self._sums.split(sizes), strict=True):
                data.copy_(sums)


def split_after(whole: Sequence[Piece], left: int) -> tuple[list[Piece], list[Piece]]:
    """Split pieces into the first ``left`` elements, counted together, and the rest."""
    return _split(whole, left, Piece.cut, lambda piece: piece.num_elements)


def _cut_view(data: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return data[:size], data[size:]


def _split[Part](
    parts: Sequence[Part],
    left: int,
    cut: Callable[[Part, int], tuple[Part, Part]],
    size: Callable[[Part], int],
) -> tuple[list[Part], list[Part]]:
    first: list[Part] = []
    rest: list[Part] = []
    for part in parts:
        ours, others = cut(part, left)
        left -= size(ours)
        first += [ours] if size(ours) else []
        rest += [others] if size(others) else []
    return first, rest


def reduce_op(bucket_group: Any) -> Any:
    """Return the reduce op of DDP's collectives, sum or average."""
    average = bucket_group.ddp_config.average_in_collective
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM


def of_shards(
    bucket_group: Any, bucket: Any, begin: int, end: int, group: dist.ProcessGroup
) -> Piece:
    """Return the same part, from ``begin`` to ``end``, of the shard of every rank of a group."""
    data = bucket.grad_data
    shards = data.chunk(group.size())
    return Piece(
        tuple((shard[begin:end],) for shard in shards),
        reduce_op(bucket_group),
        group,
        scatters=True,
        bucket=data if end - begin == shards[0].numel() else None,
    )


def ranges_of(bucket: Any, parameters: Container[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the sorted ``(begin, end)`` ranges of some parameters, of any shape, in a bucket."""
    return sorted(bucket.param_to_index[p] for p in bucket.params if p in parameters)


def slices(
    bucket: Any,
    reduced_in_iteration: Container[torch.nn.Parameter],
    slice_bytes: int,
    first: int,
    last: int,
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
    return list(outside(outside(parts, size), size))  # merges what overlaps or touches


def outside(ranges: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Yield the ``(begin, end)`` parts of ``size`` elements outside of all sorted ranges."""
    done = 0
    for begin, end in (*ranges, (size, size)):
        if done < begin:
            yield done, begin
        done = max(done, end)
