"""The gradients of one model chunk: what is complete, and what is summed next.

Their order is the one in which they become complete. Usually all are complete when the chunk's last
backward has run. In a stage whose weight gradients are computed parameter by parameter, some are
complete while others are still computed.

A reduce-scatter sums equally many gradients of every shard of a bucket. Where parameters become
complete one by one, these lie at different places in the shards:

    bucket of two replicas   │ a a a a b b │ b b c c c d │    b is not complete
    one reduce-scatter         a a a a         c c c d

What is complete of one shard alone waits. With many replicas nearly everything would wait, since a
parameter then has gradients of few shards. There it is reduced to the owners of its shards, each
at a time. A ring of n replicas carries n / (n - 1) times the bytes of a reduce-scatter for that.

Keeps one invariant: each gradient is checked, scaled and taken once.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import WHOLE
from megatron.fold3d.policy.shard_order import MOST_BALANCED, in_shards
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, group_of, is_sharded
from megatron.fold3d.runtime.grad_sync.slices import (
    Piece,
    ShardedSlice,
    Slice,
    first_of,
    in_iteration_offsets,
    outside,
    ranges_of,
    reduce_op,
    slices,
    split_after,
)

_SMALLEST = 1 << 12  # gradients: the latency of less costs more than it gains


class StageGradients:
    """The gradients of one model chunk, in one iteration after the other.

    Args:
        chunk: the model chunk, in DDP.
        kept: the parameters whose gradients Megatron reads in the iteration; `kept` returns those.
        slice_bytes: the most that is all-reduced at once.
        our_group: returns the process group that sums a bucket group, but for parts of its shards.

    Attributes:
        num_bytes: of all gradients that are not kept apart.
    """

    def __init__(
        self,
        chunk: Any,
        kept: AbstractSet[torch.nn.Parameter],
        slice_bytes: int,
        our_group: Callable[[Any], dist.ProcessGroup] = group_of,
    ) -> None:
        self._chunk, self._kept = chunk, kept
        self._slice_bytes, self._our_group = slice_bytes, our_group
        whole = [
            piece
            for bucket_group in bucket_groups(chunk)
            for bucket in bucket_group.buckets
            for piece in self._pieces(bucket_group, bucket, 0, bucket.grad_data.numel())
        ]
        self.num_bytes = sum(piece.num_bytes for piece in whole)
        self._num_elements = sum(piece.num_elements for piece in whole)
        self.restart()

    def restart(self) -> None:
        """Begin with gradients of which none is complete."""
        self._are_complete = False  # all
        self._complete: dict[Any, list[tuple[int, int]]] = {}  # by bucket
        self._waiting: dict[tuple[Any, Any], list[list[torch.Tensor]]] = {}  # by bucket and shard
        self._left: list[Piece] = []
        self._num_taken = 0

    def complete(self, unfinished: Collection[torch.Tensor] = ()) -> Sequence[Piece]:
        """Note which gradients are complete; return those that can be taken since this call.

        The pieces are views of DDP's gradient buffers, checked and scaled like DDP's. DDP neither
        starts nor waits for these bucket groups then, nor does ``finalize_model_grads``.

        Args:
            unfinished: the parameters, of any shape, whose gradients are not complete.
        """
        if self._are_complete:
            return ()
        pieces, of_shards = list[Piece](), list[Piece]()
        for bucket_group in bucket_groups(self._chunk):
            bucket_group.grad_reduce_finished = True
            for bucket in bucket_group.buckets:
                size, before = bucket.grad_data.numel(), self._complete.setdefault(bucket, [])
                others = sorted([*ranges_of(bucket, unfinished), *before])
                for begin, end in outside(others, size):
                    before.append((begin, end))
                    _make_ready(bucket_group, bucket, bucket.grad_data[begin:end])
                    if end - begin < size and sums_to_shards(self._chunk, bucket_group):
                        of_shards += self._by_owner(bucket_group, bucket, begin, end)
                    else:
                        pieces += self._pieces(bucket_group, bucket, begin, end)
        pieces += of_shards
        pieces += self._of_all_shards(_SMALLEST if unfinished else 1)
        self._left += pieces
        self._are_complete = not unfinished
        return pieces

    def take(self, end: int) -> Sequence[Piece]:
        """Take what is complete before ``end`` thousandths of all, and has not been taken."""
        taken, self._left = self._left, list[Piece]()
        if end < WHOLE:
            until = round(end * self._num_elements / WHOLE)
            taken, self._left = split_after(taken, max(0, until - self._num_taken))
        self._num_taken += sum(piece.num_elements for piece in taken)
        return taken

    def kept(self, bucket_group: Any) -> Sequence[Piece]:
        """Return what is kept apart of a bucket group, to be summed in Megatron's process group."""
        group, op = group_of(bucket_group), reduce_op(bucket_group)
        if sums_to_shards(self._chunk, bucket_group):
            return [
                ShardedSlice.of(bucket.grad_data, begin, end, op, group, group.size())
                for bucket in bucket_group.buckets
                for begin, end in in_iteration_offsets(bucket, self._kept, group.size())
            ]
        return [
            Slice(bucket.grad_data[begin:end], op, group)
            for bucket in bucket_group.buckets
            for begin, end in ranges_of(bucket, self._kept)
        ]

    def _pieces(self, bucket_group: Any, bucket: Any, begin: int, end: int) -> Iterator[Piece]:
        """Yield what is not kept apart from ``begin`` to ``end``, or of a whole sharded bucket."""
        group, op = self._our_group(bucket_group), reduce_op(bucket_group)
        if not sums_to_shards(self._chunk, bucket_group):
            for data in slices(bucket, self._kept, self._slice_bytes, begin, end):
                yield Slice(data, op, group)
            return
        kept = in_iteration_offsets(bucket, self._kept, group.size())
        for first, last in outside(kept, bucket.grad_data.numel() // group.size()):
            yield ShardedSlice.of(bucket.grad_data, first, last, op, group, group.size())

    def _by_owner(self, bucket_group: Any, bucket: Any, begin: int, end: int) -> Iterator[Piece]:
        """Yield what goes to the owner of its shard alone; the rest waits for other shards."""
        group, op = group_of(bucket_group), reduce_op(bucket_group)
        num_shards = group.size()
        waiting = self._waiting.setdefault((bucket_group, bucket), [[] for _ in range(num_shards)])
        for owner, first, last in in_shards(begin, end, bucket.grad_data.numel() // num_shards):
            data = bucket.grad_data[first:last]
            if num_shards > MOST_BALANCED:
                yield Slice(data, op, group, owner)
            else:
                waiting[owner].append(data)

    def _of_all_shards(self, smallest: int) -> Iterator[Piece]:
        """Yield what waits in every shard, if it is ``smallest`` gradients of each or more."""
        for (bucket_group, _), waiting in self._waiting.items():
            size = min(sum(data.numel() for data in shard) for shard in waiting)
            if size >= smallest:
                taken = [first_of(shard, size) for shard in waiting]
                waiting[:] = [list(rest) for _, rest in taken]
                shards = tuple(first for first, _ in taken)
                yield ShardedSlice(shards, reduce_op(bucket_group), group_of(bucket_group))


def sums_to_shards(chunk: Any, bucket_group: Any) -> bool:
    """Tell whether a chunk's bucket group is reduce-scattered: each replica gets a shard's sum."""
    return is_sharded(bucket_group) and not chunk.force_all_reduce


def spread(chunk: Any, parameters: AbstractSet[torch.Tensor]) -> list[int]:
    """Return how many gradients of some parameters, of any shape, lie in each shard.

    If shards are not reduced together, or there are none, all count as one.
    """
    counts = [0]
    for bucket_group in bucket_groups(chunk):
        num_shards = group_of(bucket_group).size()
        if not sums_to_shards(chunk, bucket_group) or num_shards > MOST_BALANCED:
            num_shards = 1
        counts += [0] * (num_shards - len(counts))
        for bucket in bucket_group.buckets:
            size = bucket.grad_data.numel() // num_shards
            for begin, end in ranges_of(bucket, parameters):
                for shard, first, last in in_shards(begin, end, size):
                    counts[shard] += last - first
    return counts


def _make_ready(bucket_group: Any, bucket: Any, data: torch.Tensor) -> None:
    """Check and scale gradients as Megatron's ``start_grad_sync`` does with whole buckets.

    ``data`` is a view of the bucket, ``[num_elements]``, in the dtype in which DDP reduces.
    """
    config = bucket_group.ddp_config
    if config.check_for_nan_in_grad or config.check_for_large_grads:
        alone = SimpleNamespace(buckets=[SimpleNamespace(grad_data=data)])
        type(bucket_group).check_grads(
            alone,
            check_for_nan_or_inf=config.check_for_nan_in_grad,
            check_for_large=config.check_for_large_grads,
        )
    if bucket.gradient_scaling_factor != 1.0:
        data.mul_(bucket.gradient_scaling_factor)
