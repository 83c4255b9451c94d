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

Keeps two invariants. Each gradient is checked, scaled and taken once. The cut depends only on the
plan, the sizes of parameters, the share and the size of a slice, so all replicas of a chunk make
the same pieces.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import WHOLE
from megatron.fold3d.policy.shard_order import MOST_BALANCED, in_shards
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, group_of, is_sharded
from megatron.fold3d.runtime.grad_sync.pieces import Piece, split_after

_SMALLEST = 1 << 12  # gradients: the latency of less costs more than it gains


class StageGradients:
    """The gradients of one model chunk, in one iteration after the other.

    Args:
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
        self._waiting: dict[Any, Piece] = {}  # by bucket, for other shards
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
        pieces, by_owner = list[Piece](), list[Piece]()
        for bucket_group in bucket_groups(self._chunk):
            bucket_group.grad_reduce_finished = True
            for bucket in bucket_group.buckets:
                size, before = bucket.grad_data.numel(), self._complete.setdefault(bucket, [])
                others = sorted([*ranges_of(bucket, unfinished), *before])
                for begin, end in outside(others, size):
                    before.append((begin, end))
                    _make_ready(bucket_group, bucket, begin, end)
                    if end - begin < size and sums_to_shards(self._chunk, bucket_group):
                        by_owner += self._by_owner(bucket_group, bucket, begin, end)
                    else:
                        pieces += self._pieces(bucket_group, bucket, begin, end)
        pieces += by_owner
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

    def copy_back(self, *, kept: bool) -> None:
        """Copy sums to gradients that a micro-batch adds to in fp32, outside of DDP's buffer.

        Args:
            kept: whether those that are kept apart are summed, or all others.
        """
        for bucket_group in bucket_groups(self._chunk):
            for bucket in bucket_group.buckets:
                for parameter in bucket.params_with_extra_main_grads:
                    if (parameter in self._kept) == kept:
                        parameter.main_grad.copy_(parameter.main_grad_copy_in_grad_buffer)

    def kept(self, bucket_group: Any) -> Sequence[Piece]:
        """Return what is kept apart of a bucket group, to be summed in Megatron's process group."""
        group, op = group_of(bucket_group), _reduce_op(bucket_group)
        if sums_to_shards(self._chunk, bucket_group):
            return [
                of_shards(bucket_group, bucket, begin, end, group)
                for bucket in bucket_group.buckets
                for begin, end in in_iteration_offsets(bucket, self._kept, group.size())
            ]
        return [
            Piece(((bucket.grad_data[begin:end],),), op, group)
            for bucket in bucket_group.buckets
            for begin, end in ranges_of(bucket, self._kept)
        ]

    def _pieces(self, bucket_group: Any, bucket: Any, begin: int, end: int) -> Iterator[Piece]:
        """Yield what is not kept apart from ``begin`` to ``end``, or of a whole sharded bucket."""
        group, op = self._our_group(bucket_group), _reduce_op(bucket_group)
        if not sums_to_shards(self._chunk, bucket_group):
            for data in slices(bucket, self._kept, self._slice_bytes, begin, end):
                yield Piece(((data,),), op, group)
            return
        kept = in_iteration_offsets(bucket, self._kept, group.size())
        for first, last in outside(kept, bucket.grad_data.numel() // group.size()):
            yield of_shards(bucket_group, bucket, first, last, group)

    def _by_owner(self, bucket_group: Any, bucket: Any, begin: int, end: int) -> Iterator[Piece]:
        """Yield what goes to the owner of its shard alone; the rest waits for other shards."""
        group, op = group_of(bucket_group), _reduce_op(bucket_group)
        num_shards, data = group.size(), bucket.grad_data
        before = self._waiting.get(bucket, Piece(((),) * num_shards, op, group, scatters=True))
        shards = list(before.shards)
        for owner, first, last in in_shards(begin, end, data.numel() // num_shards):
            if num_shards > MOST_BALANCED:
                yield Piece(((data[first:last],),), op, group, owner)
            else:
                shards[owner] += (data[first:last],)
        self._waiting[bucket] = replace(before, shards=tuple(shards))

    def _of_all_shards(self, smallest: int) -> Iterator[Piece]:
        """Yield what waits in every shard, if it is ``smallest`` gradients of each or more."""
        for bucket, waiting in self._waiting.items():
            size = min(sum(data.numel() for data in shard) for shard in waiting.shards)
            if size >= smallest:
                piece, self._waiting[bucket] = waiting.cut(size * len(waiting.shards))
                yield piece


def sums_to_shards(chunk: Any, bucket_group: Any) -> bool:
    """Tell whether a chunk's bucket group is reduce-scattered: each replica gets a shard's sum."""
    return is_sharded(bucket_group) and not chunk.force_all_reduce


def own_part(bucket_group: Any, bucket: Any, parameter: Any) -> slice:
    """Return which elements of a parameter are in this replica's shard of its bucket."""
    group = group_of(bucket_group)
    size = bucket.grad_data.numel() // group.size()
    begin, end = bucket.param_to_index[parameter]
    first = group.rank() * size
    return slice(max(0, first - begin), max(0, min(end, first + size) - begin))


def own_shard(chunks: Sequence[Any], weight: Any, stages: dist.ProcessGroup) -> torch.Tensor | None:
    """Return a view of this replica's shard of a tied embedding's gradients, or None for all.

    Megatron gives a tied word embedding a separate bucket in both stages that hold it, so its
    shards begin and end at the same elements in both. Gradients outside of the shard are neither
    complete nor read. All gradients are read if the optimizer is not distributed, if this iteration
    reduces whole gradients, or if Megatron gives the weight no bucket of its own. If more than two
    stages hold the weight, rounding depends on how a sum is cut, so the sum stays whole.

    Args:
        weight: any parameter of these chunks.
        stages: the pipeline ranks that hold a copy of the weight.

    Returns:
        ``[num_elements of the shard]``, the gradients that the optimizer reads, in DDP's memory.
        The view is empty if the replica's shard has padding alone.
    """
    if not getattr(weight, "shared_embedding", False) or stages.size() > 2:
        return None
    for chunk in chunks:
        bucket_group = getattr(chunk, "param_to_bucket_group", {}).get(weight)
        if bucket_group is not None and sums_to_shards(chunk, bucket_group):
            bucket = bucket_group.param_to_bucket[weight]
            data: torch.Tensor = weight.main_grad.view(-1)  # fp32 may have memory of its own
            return data[own_part(bucket_group, bucket, weight)]
    return None


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


def _reduce_op(bucket_group: Any) -> Any:
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
        _reduce_op(bucket_group),
        group,
        scatters=True,
        bucket=data if end - begin == shards[0].numel() else None,
    )


def _make_ready(bucket_group: Any, bucket: Any, begin: int, end: int) -> None:
    """Copy, check and scale gradients as Megatron's ``start_grad_sync`` does with whole buckets.

    They are those of the bucket from ``begin`` to ``end``, which cut no parameter.
    """
    for parameter in bucket.params_with_extra_main_grads:
        if begin <= bucket.param_to_index[parameter][0] < end:
            parameter.main_grad_copy_in_grad_buffer.copy_(parameter.main_grad)
    config, data = bucket_group.ddp_config, bucket.grad_data[begin:end]
    if config.check_for_nan_in_grad or config.check_for_large_grads:
        alone = SimpleNamespace(buckets=[SimpleNamespace(grad_data=data)])
        type(bucket_group).check_grads(
            alone,
            check_for_nan_or_inf=config.check_for_nan_in_grad,
            check_for_large=config.check_for_large_grads,
        )
    if bucket.gradient_scaling_factor != 1.0:
        data.mul_(bucket.gradient_scaling_factor)
