"""The gradients of one model chunk: what is complete, what is summed next, and the sums in flight.

Sums are all-reduces or, with the distributed optimizer, reduce-scatters, in parts that start at
different times. Gradients are summed in the order in which they become complete. Usually all are
complete when the chunk's last backward has run. In a stage whose weight gradients are computed
parameter by parameter, some are complete while others are still computed.

A reduce-scatter sums equally many gradients of every shard of a bucket. Where parameters become
complete one by one, these lie at different places in the shards:

    bucket of two replicas   │ a a a a b b │ b b c c c d │    b is not complete
    one reduce-scatter         a a a a         c c c d

What is complete of one shard alone waits. With many replicas nearly everything would wait, since a
parameter then has gradients of few shards. There it is reduced to the owners of its shards, each
at a time. A ring of n replicas carries n / (n - 1) times the bytes of a reduce-scatter for that.

Keeps two invariants. Each gradient is checked, scaled and summed once: a part starts all complete
gradients before its end that have not been started. The cut depends only on the plan, the sizes of
parameters, the share and the size of a slice, so all replicas of a chunk start the same collectives
in the same order, in process groups that nothing else uses at that time.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron.fold3d.plan.ir import WHOLE, Action, Op
from megatron.fold3d.policy.shard_order import MOST_BALANCED, in_shards
from megatron.fold3d.runtime.device import Launched
from megatron.fold3d.runtime.events import UNHEARD, Events
from megatron.fold3d.runtime.grad_sync.bucket_groups import (
    Ranks,
    bucket_groups,
    group_of,
    is_sharded,
    ranks_of,
    set_group,
    start_gathers,
)
from megatron.fold3d.runtime.grad_sync.pieces import (
    Piece,
    in_iteration_offsets,
    of_shards,
    outside,
    ranges_of,
    reduce_op,
    slices,
    split_after,
)

UNCUT = 1 << 60
"""More bytes than any bucket has: the plan's parts are not cut again."""

_SMALLEST = 1 << 12  # gradients: the latency of less costs more than it gains


class StageGradients:
    """The gradients of one model chunk, in one iteration after the other.

    If ``groups`` has none over a bucket's ranks, gradients are summed in the bucket's own group. So
    are parts of its shards.

    Args:
        stage: the chunk's, which names its sums.
        kept: the parameters whose gradients Megatron reads in the iteration: see `keep`.
        slice_bytes: the most that is all-reduced at once.

    Attributes:
        num_bytes: of all gradients that are not kept apart.
    """

    def __init__(
        self,
        chunk: Any,
        stage: int,
        recorder: Events = UNHEARD,
        kept: AbstractSet[torch.nn.Parameter] = frozenset(),
        slice_bytes: int = UNCUT,
        groups: Mapping[Ranks, dist.ProcessGroup] = MappingProxyType({}),
    ) -> None:
        self._chunk, self._stage, self._recorder = chunk, stage, recorder
        self._kept, self._slice_bytes, self._groups = kept, slice_bytes, groups
        self._keeping: list[Any] = []
        whole = [
            piece
            for bucket_group in bucket_groups(chunk)
            for bucket in bucket_group.buckets
            for piece in self._pieces(bucket_group, bucket, 0, bucket.grad_data.numel())
        ]
        self.num_bytes = sum(piece.num_bytes for piece in whole)
        self._num_elements = sum(piece.num_elements for piece in whole)
        self._restart()

    def _restart(self) -> None:
        """Begin with gradients of which none is complete."""
        # The works of each part, and what ends the part's event; None before any is complete.
        self._in_flight: list[tuple[Sequence[Launched], Callable[[], None]]] | None = None
        self._are_complete = False  # all
        self._complete: dict[Any, list[tuple[int, int]]] = {}  # by bucket
        self._waiting: dict[Any, Piece] = {}  # by bucket, for other shards
        self._left: list[Piece] = []
        self._num_taken = 0

    @property
    def is_running(self) -> bool:
        """True from the first `complete` until `wait` returns."""
        return self._in_flight is not None

    def complete(self, unfinished: Collection[torch.Tensor] = ()) -> Sequence[Piece]:
        """Note which gradients are complete; return those that can be taken since this call.

        The pieces are views of DDP's gradient buffers, checked and scaled like DDP's. DDP neither
        starts nor waits for these bucket groups then, nor does ``finalize_model_grads``.

        Args:
            unfinished: the parameters, of any shape, whose gradients are not complete.
        """
        if self._in_flight is None:
            self._in_flight = []
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

    def start_until(self, end: int) -> None:
        """Start what lies before ``end`` thousandths of the gradients, if any is complete.

        If pieces were cut only where buckets end, this starts one collective per bucket.
        """
        if self._in_flight is None:
            return  # the step has waited for all, or none is complete
        if pieces := self.take(end):
            to_shards = any(sums_to_shards(self._chunk, b) for b in bucket_groups(self._chunk))
            op = Op.REDUCE_SCATTER if to_shards else Op.ALL_REDUCE
            launched = self._recorder.collective(
                Action(self._stage, op).until(end),
                "grad_sync",
                lambda: [piece.reduce() for piece in pieces],
            )
            self._in_flight.append(launched)

    def wait(self) -> None:
        """Start what is left, and wait for the sums, if any is in flight."""
        self.start_until(WHOLE)
        in_flight = self._in_flight or ()
        if self.is_running:
            self._restart()
            for works, _ in in_flight:
                for work in works:
                    work.wait()
            self._copy_back(kept=False)
            for _, end in in_flight:
                end()

    def keep(self) -> None:
        """Start to sum what Megatron reads, in its own process groups, where no part queues."""
        for bucket_group in bucket_groups(self._chunk):
            group, op = group_of(bucket_group), reduce_op(bucket_group)
            if sums_to_shards(self._chunk, bucket_group):
                self._keeping += [
                    of_shards(bucket_group, bucket, begin, end, group).reduce()
                    for bucket in bucket_group.buckets
                    for begin, end in in_iteration_offsets(bucket, self._kept, group.size())
                ]
            elif views := [
                bucket.grad_data[begin:end]
                for bucket in bucket_group.buckets
                for begin, end in ranges_of(bucket, self._kept)
            ]:
                with _coalescing_manager(group, async_ops=True) as works:
                    for view in views:
                        dist.all_reduce(view, op, group=group, async_op=True)
                self._keeping.append(works)

    def finish_kept(self) -> None:
        """Wait for what `keep` has started."""
        for work in self._keeping:
            work.wait()
        self._keeping.clear()
        self._copy_back(kept=True)

    def gather(self) -> None:
        """Start to gather the chunk's parameters, first layers first, in our process groups.

        Buckets whose all-gather has started or ended are skipped. DDP's hooks wait for the others
        in the forward. Without ``--overlap-param-gather`` there are no hooks, so this waits.
        """
        with ExitStack() as undo:
            for bucket_group in bucket_groups(self._chunk):
                undo.callback(set_group, bucket_group, group_of(bucket_group))
                set_group(bucket_group, self._our_group(bucket_group))
            start_gathers(self._chunk)

    def _our_group(self, bucket_group: Any) -> dist.ProcessGroup:
        megatrons = group_of(bucket_group)
        return self._groups.get(ranks_of(megatrons), megatrons) if self._groups else megatrons

    def _copy_back(self, *, kept: bool) -> None:
        """Copy sums to gradients that a micro-batch adds to in fp32, outside of DDP's buffer.

        Args:
            kept: whether those that are kept apart are summed, or all others.
        """
        for bucket_group in bucket_groups(self._chunk):
            for bucket in bucket_group.buckets:
                for parameter in bucket.params_with_extra_main_grads:
                    if (parameter in self._kept) == kept:
                        parameter.main_grad.copy_(parameter.main_grad_copy_in_grad_buffer)

    def _pieces(self, bucket_group: Any, bucket: Any, begin: int, end: int) -> Iterator[Piece]:
        """Yield what is not kept apart from ``begin`` to ``end``, or of a whole sharded bucket."""
        group, op = self._our_group(bucket_group), reduce_op(bucket_group)
        if not sums_to_shards(self._chunk, bucket_group):
            for data in slices(bucket, self._kept, self._slice_bytes, begin, end):
                yield Piece(((data,),), op, group)
            return
        kept = in_iteration_offsets(bucket, self._kept, group.size())
        for first, last in outside(kept, bucket.grad_data.numel() // group.size()):
            yield of_shards(bucket_group, bucket, first, last, group)

    def _by_owner(self, bucket_group: Any, bucket: Any, begin: int, end: int) -> Iterator[Piece]:
        """Yield what goes to the owner of its shard alone; the rest waits for other shards."""
        group, op = group_of(bucket_group), reduce_op(bucket_group)
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


def reduced_in_iteration(
    chunks: Sequence[Any], groups: ProcessGroupCollection
) -> frozenset[torch.nn.Parameter]:
    """Return the parameters of a rank's chunks whose gradients must be reduced in the iteration.

    ``finalize_model_grads`` sums these over pipeline or tensor-parallel ranks at its end. They have
    to be reduced by then, even if the rest of their model chunk is deferred.
    """
    return frozenset(parameter for chunk in chunks for parameter in _of_chunk(chunk, groups))


def _of_chunk(chunk: Any, groups: ProcessGroupCollection) -> Iterator[torch.nn.Parameter]:
    """Yield what two functions of Megatron 0.19.2 reduce: word embeddings, and norms with TP."""
    config = get_model_config(chunk)
    for name, parameter in chunk.named_parameters():
        if getattr(parameter, "shared_embedding", False) or (  # _allreduce_word_embedding_grads
            groups.tp.size() > 1  # _allreduce_non_tensor_model_parallel_grads
            and (
                getattr(parameter, "average_gradients_across_tp_domain", False)
                or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
                or (config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name))
            )
        ):
            yield parameter
