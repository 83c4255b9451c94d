"""The reductions of model chunks' gradients, in slices that may start at different times.

Reductions are all-reduces or, with the distributed optimizer, reduce-scatters. The all-gathers of
parameters that follow reduce-scatters run in the same process groups.

Keeps one invariant: every replica of a chunk starts the same slices in the same order, in process
groups that nothing else uses. In Megatron's own groups, its small collectives, such as the mean of
the losses, would queue behind the slices.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron.fold3d.runtime.device import Clock
from megatron.fold3d.runtime.grad_sync.bucket_groups import (
    Ranks,
    bucket_groups,
    first_layer_first,
    group_of,
    is_sharded,
    ranks_of,
    set_group,
)
from megatron.fold3d.runtime.grad_sync.complete_parts import CompleteParts, Part
from megatron.fold3d.runtime.grad_sync.slices import (
    Piece,
    ShardedSlice,
    Slice,
    divide,
    in_iteration_offsets,
    outside,
    ranges_of,
    reduce_op,
    slices,
    split_after,
)

Observer = Callable[[Any, int], Iterable[Callable[[], None]]]
"""Called with a chunk and the bytes it starts to reduce; returns callbacks for when they end."""


class Reductions:
    """The gradient reductions in flight of one rank's model chunks.

    Args:
        slice_bytes: the largest slice that is reduced at once.
        observer: is called when slices start; it must not block.
        is_planned: True if the plan starts slices, with `start_until`. Then `start_slices`,
            `finish_backward` and `start_rest` start none; `wait` starts what is left.
    """

    def __init__(self, slice_bytes: int, observer: Observer, *, is_planned: bool = False) -> None:
        self._slice_bytes = slice_bytes
        self._observer = observer
        self.is_planned = is_planned
        self._clock: Clock
        self._chunks: Sequence[Any] = ()
        self._reduced_in_iteration: AbstractSet[torch.nn.Parameter] = frozenset()
        self._groups: Mapping[Ranks, dist.ProcessGroup] = {}
        self._keeping: list[Any] = []
        self._parts: dict[Any, CompleteParts] = {}  # by chunk whose gradients become complete
        self._left: dict[Any, int] = {}  # by chunk, gradients of its share that are not complete
        self._rest: dict[Any, list[Piece]] = {}
        self._begun: dict[Any, float] = {}  # the share that `start_until` has started
        self._running: dict[Any, list[dist.Work]] = {}
        self._ends: defaultdict[Any, list[Callable[[], None]]] = defaultdict(list)  # not observed

    def connect(
        self,
        chunks: Sequence[Any],
        reduced_in_iteration: AbstractSet[torch.nn.Parameter],
        groups: Mapping[Ranks, dist.ProcessGroup],
    ) -> None:
        """Set the model chunks, the parameters to reduce in the iteration, and groups by ranks.

        Without a group over the same ranks, slices are reduced in that of the bucket.
        """
        self._clock = Clock(next(chunks[0].parameters()).device)
        self._chunks, self._reduced_in_iteration, self._groups = (
            chunks,
            reduced_in_iteration,
            groups,
        )

    def cut(self, chunk: Any, unfinished: Collection[torch.Tensor] = ()) -> list[Piece]:
        """Prepare a chunk's complete gradients for reduction and return them as slices.

        The slices are views of DDP's gradient buffers. Scaling by DDP's factor has been applied.

        Args:
            chunk: the model chunk.
            unfinished: parameters, of any shape, whose gradients are not complete. A later call
                returns those.
        """
        parts = self._parts.setdefault(chunk, CompleteParts(chunk))
        return [piece for part in parts.take(unfinished) for piece in self._pieces(part)]

    def start_slices(
        self, chunk: Any, complete: Sequence[Piece], share: float, *, are_last: bool = True
    ) -> None:
        """Start a chunk's slices until the first ``share`` of all its gradients has been started.

        Args:
            chunk: the model chunk.
            complete: its slices that are complete since the last call.
            share: the same in all calls for an iteration.
            are_last: whether the chunk's gradients are complete now. Then this first starts what
                is reduced in the iteration.
        """
        if chunk not in self._left:
            assert chunk not in self._running, "its gradients were not waited for"
            whole = sum(piece.num_elements for piece in self._whole(chunk))
            self._left[chunk] = 0 if self.is_planned else round(share * whole)
            self._rest[chunk], self._running[chunk], self._begun[chunk] = [], [], 0.0
        if are_last:
            for bucket_group in bucket_groups(chunk):
                self._keep(bucket_group)
            self._parts.pop(chunk, None)
        first, rest = split_after(complete, self._left[chunk])
        self._left[chunk] -= sum(piece.num_elements for piece in first)
        self._rest[chunk] += rest
        self._running[chunk] += self._reduce(chunk, first)
        if are_last:
            del self._left[chunk]

    def start_until(self, chunk: Any, share: float) -> None:
        """Start a chunk's slices up to ``share`` of all, if its reduction is in flight.

        If slices were cut only where buckets end, this starts one collective per bucket.
        """
        begun = self._begun.get(chunk, 0.0)
        if chunk in self._running and share > begun:
            part = (share - begun) / (1 - begun)
            first, self._rest[chunk] = divide(self._rest.get(chunk, ()), part)
            self._running[chunk] += self._reduce(chunk, first)
            self._begun[chunk] = share

    def rest_bytes(self, chunk: Any) -> int:
        """Return the bytes of a chunk's slices that have not been started."""
        return sum(part.num_bytes for part in self._rest.get(chunk, ()))

    def finish_backward(self) -> None:
        """Start the first chunk's remaining slices; wait for what is reduced in the iteration."""
        if not self.is_planned:
            self.start_rest_of(self._chunks[0])
        for work in self._keeping:
            work.wait()
        self._keeping.clear()

    def start_rest(self) -> None:
        """Start the remaining slices of all chunks, lowest chunk first."""
        if self.is_planned:
            return
        for chunk in self._chunks:
            self.start_rest_of(chunk)

    def gather(self, chunk: Any) -> None:
        """Start to gather a chunk's parameters, first layers first, in our process groups.

        Buckets whose all-gather has started or ended are skipped. DDP's hooks wait for the others
        in the forward. Without ``--overlap-param-gather`` there are no hooks, so this waits.
        """
        for bucket_group in first_layer_first(chunk):
            if not bucket_group.param_gather_dispatched:
                megatrons = group_of(bucket_group)
                set_group(bucket_group, self._groups[ranks_of(megatrons)])
                try:
                    bucket_group.start_param_sync()
                finally:
                    set_group(bucket_group, megatrons)

    def start_rest_of(self, chunk: Any) -> None:
        """Start a chunk's remaining slices, if there are any."""
        if chunk in self._running:
            self._running[chunk] += self._reduce(chunk, self._rest.pop(chunk, ()))

    def is_running(self, chunk: Any) -> bool:
        """True from the start of a chunk's reduction until `wait` returns."""
        return chunk in self._running

    def wait(self, chunk: Any) -> None:
        """Start a chunk's remaining slices and wait for its reduction, if one is in flight."""
        self.start_rest_of(chunk)
        for work in self._running.pop(chunk, ()):
            work.wait()
        for end in self._ends.pop(chunk, ()):
            end()

    def _reduce(self, chunk: Any, parts: Sequence[Piece]) -> list[dist.Work]:
        if not parts:
            return []
        ends = self._observer(chunk, sum(part.num_bytes for part in parts))
        works = [part.reduce() for part in parts]
        self._ends[chunk] += [end for end in ends if not self._clock.when_done(works, end)]
        return works

    def _keep(self, bucket_group: Any) -> None:
        """Reduce `reduced_in_iteration` in Megatron's own process group, where no slice queues."""
        if is_sharded(bucket_group):
            self._keep_sharded(bucket_group)
            return
        parts = [
            bucket.grad_data[begin:end]
            for bucket in bucket_group.buckets
            for begin, end in ranges_of(bucket, self._reduced_in_iteration)
        ]
        if parts:
            group = group_of(bucket_group)
            with _coalescing_manager(group, async_ops=True) as works:
                for part in parts:
                    dist.all_reduce(part, reduce_op(bucket_group), group=group)
            self._keeping.append(works)

    def _keep_sharded(self, bucket_group: Any) -> None:
        group = group_of(bucket_group)
        for bucket in bucket_group.buckets:
            kept = in_iteration_offsets(bucket, self._reduced_in_iteration, group.size())
            self._keeping += [
                part.reduce() for part in _sharded_slices(bucket_group, bucket, group, kept)
            ]

    def _whole(self, chunk: Any) -> Iterator[Piece]:
        """Yield all pieces of a chunk, complete or not."""
        for bucket_group in bucket_groups(chunk):
            for bucket in bucket_group.buckets:
                yield from self._pieces(Part(bucket_group, bucket, 0, bucket.grad_data.numel()))

    def _pieces(self, part: Part) -> Iterator[Piece]:
        """Yield the pieces of a part, but for what is reduced in the iteration."""
        bucket_group, bucket = part.bucket_group, part.bucket
        megatrons = group_of(bucket_group)
        ours = self._groups.get(ranks_of(megatrons), megatrons)
        kept = self._reduced_in_iteration
        if not is_sharded(bucket_group):
            for data in slices(bucket, kept, self._slice_bytes, part.begin, part.end):
                yield Slice(data, reduce_op(bucket_group), ours)
            return
        size = bucket.grad_data.numel()
        assert (part.begin, part.end) == (0, size), "a part of a bucket is no part of all shards"
        offsets = in_iteration_offsets(bucket, kept, ours.size())
        rest = outside(offsets, size // ours.size())
        yield from _sharded_slices(bucket_group, bucket, ours, rest)


def _sharded_slices(
    bucket_group: Any, bucket: Any, group: dist.ProcessGroup, parts: Iterable[tuple[int, int]]
) -> Iterator[ShardedSlice]:
    for begin, end in parts:
        yield ShardedSlice(
            data=bucket.grad_data,
            begin=begin,
            end=end,
            op=reduce_op(bucket_group),
            group=group,
            rank=group.rank(),
            size=group.size(),
        )
