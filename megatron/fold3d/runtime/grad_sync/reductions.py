"""The gradient sums of model chunks, in parts that start at different times.

Sums are all-reduces or, with the distributed optimizer, reduce-scatters. The order of a chunk's
gradients is the order in which they are taken: as they become complete.

Keeps two invariants. A part starts what lies before its end, is complete, and was not started: so
nothing is lost or sent twice. Every replica of a chunk starts the same collectives in the same
order, in process groups that nothing else uses at that time.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron.fold3d.plan.ir import WHOLE
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
from megatron.fold3d.runtime.grad_sync.shard_reductions import ShardParts
from megatron.fold3d.runtime.grad_sync.slices import (
    Piece,
    ShardedSlice,
    Slice,
    Transfer,
    in_iteration_offsets,
    outside,
    ranges_of,
    reduce_op,
    slices,
    split_after,
)

UNCUT = 1 << 60
"""More bytes than any bucket has: the plan's parts are not cut again."""

Observer = Callable[[Any, int, int], Iterable[Callable[[], None]]]
"""Called with a chunk, the end of a part in thousandths, and the bytes whose sum starts.

It returns callbacks for when they end.
"""


@dataclass(slots=True)
class _InFlight:
    """A chunk's gradients, from when the first are complete until their sums are waited for."""

    parts: CompleteParts | None  # None once all are complete
    shards: ShardParts
    started: int = 0  # gradients
    left: list[Piece] = field(default_factory=list)
    works: list[Transfer] = field(default_factory=list)
    ends: list[Callable[[], None]] = field(default_factory=list)  # not observed


class Reductions:
    """The gradient sums in flight of one rank's model chunks.

    Args:
        slice_bytes: the most that is summed at once.
        observer: is called when a part starts; it must not block.
    """

    def __init__(self, slice_bytes: int, observer: Observer) -> None:
        self._slice_bytes = slice_bytes
        self._observer = observer
        self._clock: Clock
        self._chunks: Sequence[Any] = ()
        self._reduced_in_iteration: AbstractSet[torch.nn.Parameter] = frozenset()
        self._groups: Mapping[Ranks, dist.ProcessGroup] = {}
        self._sizes: dict[Any, int] = {}  # of chunks: gradients that are not kept
        self._in_flight: dict[Any, _InFlight] = {}
        self._keeping: dict[Any, list[Any]] = {}

    def connect(
        self,
        chunks: Sequence[Any],
        reduced_in_iteration: AbstractSet[torch.nn.Parameter] = frozenset(),
        groups: Mapping[Ranks, dist.ProcessGroup] | None = None,
    ) -> None:
        """Set the model chunks, the parameters that are kept apart, and groups by ranks.

        Without a group over the same ranks, gradients are summed in that of the bucket.
        """
        self._clock = Clock(next(chunks[0].parameters()).device)
        self._chunks, self._reduced_in_iteration = chunks, reduced_in_iteration
        self._groups = groups or {}
        self._sizes = {
            chunk: sum(piece.num_elements for piece in self._whole(chunk)) for chunk in chunks
        }

    def num_bytes(self, chunk: Any) -> int:
        """Return the bytes of all gradients of a chunk that are not kept apart."""
        return sum(piece.num_bytes for piece in self._whole(chunk))

    def take(self, chunk: Any, unfinished: Collection[torch.Tensor] = ()) -> Sequence[Piece]:
        """Take what is complete of a chunk's gradients, to be started later, and return it.

        The pieces are views of DDP's gradient buffers, checked and scaled by DDP's factor.

        Args:
            chunk: the model chunk.
            unfinished: the parameters, of any shape, whose gradients are not complete. A later call
                takes those.
        """
        if chunk not in self._in_flight:
            self._in_flight[chunk] = _InFlight(CompleteParts(chunk), ShardParts())
        state = self._in_flight[chunk]
        if state.parts is None:
            return ()
        pieces: list[Piece] = []
        partial: list[Part] = []
        for part in state.parts.take(unfinished):
            if self._sums_to_shards(chunk, part.bucket_group) and not part.is_whole:
                partial.append(part)
            else:
                pieces += self._pieces(chunk, part)
        pieces += state.shards.take(partial, are_last=not unfinished)
        state.left += pieces
        if not unfinished:
            state.parts = None
        return pieces

    def start_until(self, chunk: Any, end: int) -> None:
        """Start what lies before ``end`` thousandths of a chunk's gradients, if any is in flight.

        If pieces were cut only where buckets end, this starts one collective per bucket.
        """
        if (state := self._in_flight.get(chunk)) is None:
            return  # its step has waited for all, or none is complete
        first, rest = state.left, list[Piece]()
        if end < WHOLE:
            until = round(end * self._sizes[chunk] / WHOLE)
            first, rest = split_after(first, max(0, until - state.started))
        if not first:
            return
        state.left = rest
        state.started += sum(piece.num_elements for piece in first)
        ends = self._observer(chunk, end, sum(piece.num_bytes for piece in first))
        works = [piece.reduce() for piece in first]
        state.works += works
        state.ends += [each for each in ends if not self._clock.when_done(works, each)]

    def start_left(self) -> None:
        """Start all that is complete and was not started, lowest chunk first."""
        for chunk in self._chunks:
            self.start_until(chunk, WHOLE)

    def is_running(self, chunk: Any) -> bool:
        """True from the first `take` of a chunk's gradients until `wait` returns."""
        return chunk in self._in_flight

    def wait(self, chunk: Any) -> None:
        """Start what is left of a chunk, and wait for its sums, if any is in flight."""
        self.start_until(chunk, WHOLE)
        if (state := self._in_flight.pop(chunk, None)) is not None:
            for work in state.works:
                work.wait()
            for end in state.ends:
                end()

    def keep(self, chunk: Any) -> None:
        """Start to sum what Megatron reads, in its own process groups, where no part queues."""
        for bucket_group in bucket_groups(chunk):
            self._keep(chunk, bucket_group)

    def finish_kept(self, chunk: Any) -> None:
        """Wait for what `keep` has started."""
        for work in self._keeping.pop(chunk, ()):
            work.wait()

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

    def _keep(self, chunk: Any, bucket_group: Any) -> None:
        keeping, group = self._keeping.setdefault(chunk, []), group_of(bucket_group)
        if self._sums_to_shards(chunk, bucket_group):
            for bucket in bucket_group.buckets:
                kept = in_iteration_offsets(bucket, self._reduced_in_iteration, group.size())
                keeping += [
                    part.reduce() for part in _sharded_slices(bucket_group, bucket, group, kept)
                ]
            return
        parts = [
            bucket.grad_data[begin:end]
            for bucket in bucket_group.buckets
            for begin, end in ranges_of(bucket, self._reduced_in_iteration)
        ]
        if parts:
            with _coalescing_manager(group, async_ops=True) as works:
                for part in parts:
                    dist.all_reduce(part, reduce_op(bucket_group), group=group)
            keeping.append(works)

    def _whole(self, chunk: Any) -> Iterator[Piece]:
        """Yield all pieces of a chunk, complete or not."""
        for bucket_group in bucket_groups(chunk):
            for bucket in bucket_group.buckets:
                part = Part(bucket_group, bucket, 0, bucket.grad_data.numel())
                yield from self._pieces(chunk, part)

    def _pieces(self, chunk: Any, part: Part) -> Iterator[Piece]:
        """Yield the pieces of a part, but for what is kept apart."""
        bucket_group, bucket = part.bucket_group, part.bucket
        megatrons = group_of(bucket_group)
        ours = self._groups.get(ranks_of(megatrons), megatrons)
        kept = self._reduced_in_iteration
        if not self._sums_to_shards(chunk, bucket_group):
            for data in slices(bucket, kept, self._slice_bytes, part.begin, part.end):
                yield Slice(data, reduce_op(bucket_group), ours)
            return
        offsets = in_iteration_offsets(bucket, kept, ours.size())
        rest = outside(offsets, bucket.grad_data.numel() // ours.size())
        yield from _sharded_slices(bucket_group, bucket, ours, rest)

    def _sums_to_shards(self, chunk: Any, bucket_group: Any) -> bool:
        return is_sharded(bucket_group) and not chunk.force_all_reduce


def _sharded_slices(
    bucket_group: Any, bucket: Any, group: dist.ProcessGroup, parts: Iterable[tuple[int, int]]
) -> Iterator[ShardedSlice]:
    for begin, end in parts:
        yield ShardedSlice.of(
            bucket.grad_data, begin, end, reduce_op(bucket_group), group, group.size()
        )
