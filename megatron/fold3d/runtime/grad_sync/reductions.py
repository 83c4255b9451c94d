"""The all-reduces of model chunks' gradients, in slices that may be started at two moments.

Keeps one invariant: every replica of a chunk starts the same slices in the same order, in process
groups that nothing else uses: Megatron's own collectives, such as the mean of the losses, would
stand in the queue behind them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron.fold3d.runtime.grad_sync.bucket_groups import Ranks, bucket_groups, ranks_of
from megatron.fold3d.runtime.grad_sync.slices import Slice, divide, kept_ranges, slices
from megatron.fold3d.runtime.trace.recorder import when_done

Observer = Callable[[Any, int], Iterable[Callable[[], None]]]
"""Called with a chunk and the bytes it starts to reduce; returns callbacks for when they end."""


class Reductions:
    """The gradient reductions in flight of one rank's model chunks.

    Args:
        slice_bytes: the largest slice that is reduced at once.
        observer: is called when slices start; it must not block.
    """

    def __init__(self, slice_bytes: int, observer: Observer) -> None:
        self._slice_bytes = slice_bytes
        self._observer = observer
        self._chunks: Sequence[Any] = ()
        self._reduced_in_iteration: AbstractSet[torch.nn.Parameter] = frozenset()
        self._groups: Mapping[Ranks, dist.ProcessGroup] = {}
        self._keeping: list[Any] = []
        self._rest: dict[Any, list[Slice]] = {}
        self._running: dict[Any, list[dist.Work]] = {}
        self._ends: defaultdict[Any, list[Callable[[], None]]] = defaultdict(list)  # not heard of

    def connect(
        self,
        chunks: Sequence[Any],
        reduced_in_iteration: AbstractSet[torch.nn.Parameter],
        groups: Mapping[Ranks, dist.ProcessGroup],
    ) -> None:
        """Set the model chunks, the parameters to keep back, and our process groups by ranks."""
        self._chunks, self._reduced_in_iteration, self._groups = (
            chunks,
            reduced_in_iteration,
            groups,
        )

    def cut(self, chunk: Any) -> list[Slice]:
        """Prepare a chunk's complete gradients for reduction and return them as slices.

        The slices are views of DDP's gradient buffers. Scaling by DDP's factor has been applied.
        """
        return [
            Slice(data, _op(bucket_group), self._groups[ranks_of(bucket_group.data_parallel_group)])
            for bucket_group in bucket_groups(chunk)
            for bucket in _made_ready(bucket_group).buckets
            for data in slices(bucket, self._reduced_in_iteration, self._slice_bytes)
        ]

    def start(self, chunk: Any, whole: Sequence[Slice], share: float) -> None:
        """Start to reduce what is kept back, then the first ``share`` of a chunk's slices."""
        assert chunk not in self._running, "its gradients were not waited for"
        for bucket_group in bucket_groups(chunk):
            self._keep(bucket_group)
        first, self._rest[chunk] = divide(whole, share)
        self._running[chunk] = self._reduce(chunk, first)

    @property
    def rest_bytes(self) -> int:
        """The bytes of all chunks' slices that have not been started."""
        return sum(part.num_bytes for rest in self._rest.values() for part in rest)

    def finish_backward(self) -> None:
        """Start the first chunk's remaining slices, then wait for what is kept back."""
        self._start_rest(self._chunks[0])
        for work in self._keeping:
            work.wait()
        self._keeping.clear()

    def start_rest(self) -> None:
        """Start the remaining slices of all chunks, lowest chunk first."""
        for chunk in self._chunks:
            self._start_rest(chunk)

    def is_running(self, chunk: Any) -> bool:
        """True from the start of a chunk's reduction until `wait` returns."""
        return chunk in self._running

    def wait(self, chunk: Any) -> None:
        """Start a chunk's remaining slices and wait for its reduction, if one is in flight."""
        self._start_rest(chunk)
        for work in self._running.pop(chunk, ()):
            work.wait()
        for end in self._ends.pop(chunk, ()):
            end()

    def _start_rest(self, chunk: Any) -> None:
        if chunk in self._running:
            self._running[chunk] += self._reduce(chunk, self._rest.pop(chunk, ()))

    def _reduce(self, chunk: Any, parts: Sequence[Slice]) -> list[dist.Work]:
        if not parts:
            return []
        ends = self._observer(chunk, sum(part.num_bytes for part in parts))
        works = [part.reduce() for part in parts]
        self._ends[chunk] += [end for end in ends if not when_done(works, end)]
        return works

    def _keep(self, bucket_group: Any) -> None:
        """Reduce what is kept back in Megatron's own process group, where no slice is queued."""
        parts = [
            bucket.grad_data[begin:end]
            for bucket in bucket_group.buckets
            for begin, end in kept_ranges(bucket, self._reduced_in_iteration)
        ]
        if parts:
            group = bucket_group.data_parallel_group
            with _coalescing_manager(group, async_ops=True) as works:
                for part in parts:
                    dist.all_reduce(part, _op(bucket_group), group=group)
            self._keeping.append(works)


def _op(bucket_group: Any) -> Any:
    average = bucket_group.ddp_config.average_in_collective
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM


def _made_ready(bucket_group: Any) -> Any:
    """Check and scale gradients as Megatron's ``start_grad_sync`` does; mark them as reduced.

    ``finalize_model_grads`` then skips this bucket group.
    """
    config = bucket_group.ddp_config
    if config.check_for_nan_in_grad or config.check_for_large_grads:
        bucket_group.check_grads(
            check_for_nan_or_inf=config.check_for_nan_in_grad,
            check_for_large=config.check_for_large_grads,
        )
    for bucket in bucket_group.buckets:
        if bucket.gradient_scaling_factor != 1.0:
            bucket.grad_data *= bucket.gradient_scaling_factor
    bucket_group.grad_reduce_finished = True
    return bucket_group
