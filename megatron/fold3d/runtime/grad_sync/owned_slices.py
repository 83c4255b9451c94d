"""Parts of a bucket that are reduced to the replicas that own them, with the distributed optimizer.

A replica owns one shard of a bucket. A reduce-scatter sums the same part of every shard, and such
a part has gradients of nearly all parameters. So where parameters become complete one by one, what
is complete of each shard is reduced to the shard's owner alone:

    bucket of two replicas   │ a a a b b b │ b c c c c c │    b and c are not complete
    reduced                    a a a to the first

A link carries as many bytes as with reduce-scatters. If parameters of several shards are in flight,
it carries them in both directions.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.fold3d.runtime.grad_sync.bucket_groups import group_of
from megatron.fold3d.runtime.grad_sync.complete_parts import Part
from megatron.fold3d.runtime.grad_sync.slices import reduce_op


class Transfer(Protocol):
    """Communication that has been started."""

    def wait(self) -> object:
        """Wait for its result, which is then valid on the current stream."""

    def get_future(self) -> Any:
        """Return a future that is done with the communication, as `dist.Work` does."""


def reduce_to_owners(part: Part) -> Sequence[Transfer]:
    """Start to reduce a part of a bucket; return what has to be waited for.

    The owners' views are valid on the stream that is current during that wait. What other replicas
    hold there afterwards is undefined, as after a reduce-scatter.
    """
    group = group_of(part.bucket_group)
    if dist.get_backend(group) == "gloo":  # its reduce sends up to 1.5 times the bytes
        return [_Exchange(part, group)]
    op = reduce_op(part.bucket_group)
    return [
        _started(dist.reduce(data, group_dst=owner, op=op, group=group, async_op=True))
        for owner, data in _by_owner(part, group.size())
    ]


class _Exchange:
    """A part's gradients, on their way from all replicas to their owners, who add them up."""

    def __init__(self, part: Part, group: dist.ProcessGroup) -> None:
        assert reduce_op(part.bucket_group) == dist.ReduceOp.SUM, "gloo does not average"
        pieces = dict(_by_owner(part, group.size()))
        self._own = pieces.get(group.rank())
        num_own = 0 if self._own is None else self._own.numel()
        self._received = part.data.new_empty(group.size() * num_own)
        self._work = _started(
            dist.all_to_all_single(
                self._received,
                part.data,
                [num_own] * group.size(),
                [pieces[r].numel() if r in pieces else 0 for r in range(group.size())],
                group=group,
                async_op=True,
            )
        )

    def get_future(self) -> Any:
        """Return a future that is done when all gradients are there; they are not added up then."""
        return self._work.get_future()

    def wait(self) -> None:
        """Wait for the other replicas' gradients and add them up, in the replicas' order."""
        self._work.wait()
        if self._own is not None:
            first, *others = self._received.view(-1, self._own.numel())
            self._own.copy_(first)
            for other in others:
                self._own += other


def _by_owner(part: Part, num_replicas: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield owners in the order of their shards, and views of what each owns of a part."""
    data: torch.Tensor = part.bucket.grad_data
    size = data.numel() // num_replicas
    for owner in range(part.begin // size, -(-part.end // size)):
        begin, end = owner * size, (owner + 1) * size
        yield owner, data[max(begin, part.begin) : min(end, part.end)]


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
