"""Parts of a model chunk's gradients, reduced to the shards of the distributed optimizer.

A reduce-scatter sums equally many gradients of every shard of a bucket. Where parameters become
complete one by one, these lie at different places in the shards:

    bucket of two replicas   │ a a a a b b │ b b c c c d │    b is not complete
    one reduce-scatter         a a a a         c c c d

What is complete of one shard alone waits. With many replicas nearly everything would wait, since a
parameter then has gradients of few shards. There it is reduced to the owners of its shards, each
at a time. A ring of n replicas carries n / (n - 1) times the bytes of a reduce-scatter for that.
"""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.fold3d.policy.shard_order import MOST_BALANCED, in_shards
from megatron.fold3d.runtime.device import Launched
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, group_of, is_sharded
from megatron.fold3d.runtime.grad_sync.complete_parts import Part
from megatron.fold3d.runtime.grad_sync.slices import ranges_of, reduce_op

_SMALLEST = 1 << 12  # gradients: the latency of less costs more than it gains


class Transfer(Launched, Protocol):
    """Communication that has been started, such as a `dist.Work`."""

    def wait(self) -> object:
        """Wait for its result, which is then valid on the current stream."""


class ShardReductions:
    """The reductions of one model chunk in an iteration; all replicas start the same ones.

    The own shard is valid on the stream that is current when a transfer is waited for. What other
    shards hold afterwards is undefined, as after a reduce-scatter.
    """

    def __init__(self) -> None:
        self._groups: dict[Any, Any] = {}  # the bucket group of each bucket
        self._waiting: dict[Any, list[list[torch.Tensor]]] = {}  # by bucket and shard

    def start(self, parts: Iterable[Part], *, are_last: bool) -> list[Transfer]:
        """Start to reduce what is complete of every shard.

        Args:
            parts: complete since the last call.
            are_last: whether the chunk's gradients are complete now, so that none waits.
        """
        transfers: list[Transfer] = []
        for part in parts:
            num_replicas = group_of(part.bucket_group).size()
            if num_replicas > MOST_BALANCED:
                transfers += _reduced_to_owners(part)
                continue
            self._groups[part.bucket] = part.bucket_group
            waiting = self._waiting.setdefault(part.bucket, [[] for _ in range(num_replicas)])
            for owner, data in _by_owner(part, num_replicas):
                waiting[owner].append(data)
        for bucket, waiting in self._waiting.items():
            size = min(sum(data.numel() for data in shard) for shard in waiting)
            if size >= (1 if are_last else _SMALLEST):
                taken = [_taken(shard, size) for shard in waiting]
                transfers.append(_Scatter(self._groups[bucket], bucket, taken))
        return transfers


class _Scatter:
    """A reduce-scatter of as many gradients of each shard, wherever they lie in it.

    Args:
        bucket_group: DDP's.
        bucket: one of its buckets.
        shards: views of the bucket by shard, together equally large.
    """

    def __init__(
        self, bucket_group: Any, bucket: Any, shards: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        group = group_of(bucket_group)
        views = [data for shard in shards for data in shard]
        num_elements = sum(data.numel() for data in views)
        if num_elements == bucket.grad_data.numel():  # then it is in the right order already
            together = bucket.grad_data
            shards = [[shard] for shard in together.chunk(group.size())]
        else:
            together = torch.cat(views)
        self._own = shards[group.rank()]
        self._together = together  # kept while it is read
        self._sums = together.new_empty(num_elements // group.size())
        work: dist.Work | None = dist.reduce_scatter_tensor(
            self._sums, together, reduce_op(bucket_group), group=group, async_op=True
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
        for data, sums in zip(
            self._own, self._sums.split([data.numel() for data in self._own]), strict=True
        ):
            data.copy_(sums)


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


def _reduced_to_owners(part: Part) -> Iterator[dist.Work]:
    group, op = group_of(part.bucket_group), reduce_op(part.bucket_group)
    for owner, data in _by_owner(part, group.size()):
        work = dist.reduce(data, group_dst=owner, op=op, group=group, async_op=True)
        assert work is not None
        yield work


def _by_owner(part: Part, num_replicas: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield owners in the order of their shards, and views of what each owns of a part."""
    data: torch.Tensor = part.bucket.grad_data
    size = data.numel() // num_replicas
    for owner, begin, end in in_shards(part.begin, part.end, size):
        yield owner, data[begin:end]


def _taken(waiting: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """Take the first ``size`` gradients of ``waiting``, which keeps the others."""
    taken: list[torch.Tensor] = []
    while size:
        first = waiting.pop(0)
        if first.numel() > size:
            waiting.insert(0, first[size:])
            first = first[:size]
        taken.append(first)
        size -= first.numel()
    return taken
