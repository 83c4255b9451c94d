"""Parts of a model chunk's gradients, reduced to the shards of the distributed optimizer.

A reduce-scatter sums equally many gradients of every shard of a bucket. Where parameters become
complete one by one, these lie at different places in the shards:

    bucket of two replicas   │ a a a a b b │ b b c c c d │    b is not complete
    one reduce-scatter         a a a a         c c c d

What is complete of one shard alone waits. With many replicas nearly everything would wait, since a
parameter then has gradients of few shards. There it is reduced to the owners of its shards, each
at a time. A ring of n replicas carries n / (n - 1) times the bytes of a reduce-scatter for that.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from megatron.fold3d.policy.shard_order import MOST_BALANCED, in_shards
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, group_of, is_sharded
from megatron.fold3d.runtime.grad_sync.complete_parts import Part
from megatron.fold3d.runtime.grad_sync.slices import (
    Piece,
    ShardedSlice,
    Slice,
    first_of,
    ranges_of,
    reduce_op,
)

_SMALLEST = 1 << 12  # gradients: the latency of less costs more than it gains


class ShardParts:
    """Complete parts of one model chunk's buckets, as pieces that are reduced to shards.

    What other shards hold afterwards is undefined, as after a reduce-scatter.
    """

    def __init__(self) -> None:
        self._groups: dict[Any, Any] = {}  # the bucket group of each bucket
        self._waiting: dict[Any, list[list[torch.Tensor]]] = {}  # by bucket and shard

    def take(self, parts: Iterable[Part], *, are_last: bool) -> Iterator[Piece]:
        """Yield what is complete of every shard.

        Args:
            parts: complete since the last call.
            are_last: whether the chunk's gradients are complete now, so that none waits.
        """
        for part in parts:
            num_replicas = group_of(part.bucket_group).size()
            if num_replicas > MOST_BALANCED:
                group, op = group_of(part.bucket_group), reduce_op(part.bucket_group)
                for owner, data in _by_owner(part, num_replicas):
                    yield Slice(data, op, group, owner)
                continue
            self._groups[part.bucket] = part.bucket_group
            waiting = self._waiting.setdefault(part.bucket, [[] for _ in range(num_replicas)])
            for owner, data in _by_owner(part, num_replicas):
                waiting[owner].append(data)
        for bucket, waiting in self._waiting.items():
            size = min(sum(data.numel() for data in shard) for shard in waiting)
            if size >= (1 if are_last else _SMALLEST):
                group = self._groups[bucket]
                taken = [first_of(shard, size) for shard in waiting]
                waiting[:] = [list(rest) for _, rest in taken]
                shards = tuple(first for first, _ in taken)
                yield ShardedSlice(shards, reduce_op(group), group_of(group))


def spread(chunk: Any, parameters: AbstractSet[torch.Tensor]) -> list[int]:
    """Return how many gradients of some parameters, of any shape, lie in each shard.

    If shards are not reduced together, or there are none, all count as one.
    """
    counts = [0]
    for bucket_group in bucket_groups(chunk):
        num_shards = group_of(bucket_group).size()
        if not is_sharded(bucket_group) or chunk.force_all_reduce or num_shards > MOST_BALANCED:
            num_shards = 1
        counts += [0] * (num_shards - len(counts))
        for bucket in bucket_group.buckets:
            size = bucket.grad_data.numel() // num_shards
            for begin, end in ranges_of(bucket, parameters):
                for shard, first, last in in_shards(begin, end, size):
                    counts[shard] += last - first
    return counts


def _by_owner(part: Part, num_replicas: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield owners in the order of their shards, and views of what each owns of a part."""
    data: torch.Tensor = part.bucket.grad_data
    size = data.numel() // num_replicas
    for owner, begin, end in in_shards(part.begin, part.end, size):
        yield owner, data[begin:end]
