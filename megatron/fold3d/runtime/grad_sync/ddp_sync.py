"""DP.sync, one segment at a time, through Megatron's DDP and its hooks.

Keeps one invariant: within an iteration a bucket's gradients are reduced once, either by DDP's
hooks inside the segment's last backward or by an explicit start after it, never by both. A segment
whose DP.sync reaches into the next iteration is `DeferredSync`'s.
"""

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch

from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups
from megatron.fold3d.runtime.grad_sync.deferred_sync import DeferredSync


class GradSync:
    """Gradient reduction and parameter gathering of the model chunks of one rank.

    As a context manager it spans one iteration and keeps DDP's hooks quiet; a segment whose last
    backward is about to run is released by `release`, and `reduce` starts what hooks did not.
    """

    def __init__(
        self,
        config: Any,
        chunks: Sequence[torch.nn.Module],
        *,
        trains: bool,
        deferred: DeferredSync | None = None,
        deferred_segments: Container[int] = (),
    ) -> None:
        self._chunks: Sequence[Any] = chunks
        self._deferred = deferred
        self._deferred_segments = deferred_segments if deferred is not None else ()
        self._quiet = [ExitStack() for _ in chunks]
        # Megatron sets the first with --overlap-grad-reduce; else nothing can start early. The
        # second it leaves out as long as parameters are whole, and where hooks gather them.
        self._no_sync = _per_chunk(config.no_sync_func, chunks)
        self._gathers = trains and config.param_sync_func is not None

    def __enter__(self) -> Self:
        for segment in range(len(self._chunks)):
            self._hush(segment)
        return self

    def __exit__(self, *_: object) -> None:
        for quiet in self._quiet:
            quiet.close()

    def release(self, segment: int) -> None:
        """Let hooks reduce the gradients that become ready from now on: the last micro-batch's."""
        if segment not in self._deferred_segments:
            self._quiet[segment].close()

    def reduce(self, segment: int) -> None:
        """Start to reduce what hooks did not: in the first iteration DDP has them only count."""
        self._quiet[segment].close()
        chunk = self._chunks[segment]
        if self._no_sync is not None:
            for bucket_group in bucket_groups(chunk):
                _forget_partial_counts(bucket_group)
        if self._deferred is not None and segment in self._deferred_segments:
            self._deferred.start(chunk)
        elif self._no_sync is not None:
            for bucket_group in bucket_groups(chunk):
                if not (_reduced_by_hooks(bucket_group) or _reduced_when_finished(bucket_group)):
                    bucket_group.start_grad_sync(force_all_reduce=chunk.force_all_reduce)

    def wait(self, segment: int) -> None:
        """End the segment's reduction: of a deferred one, that of the iteration before.

        Megatron's ``finalize_model_grads`` then finds it ended and goes on to the next.
        """
        chunk = self._chunks[segment]
        if self._deferred is not None and segment in self._deferred_segments:
            self._deferred.settle(chunk)
            self._quiet[segment].close()
            self._hush(segment)  # zeroed gradients are a new start for DDP, and its hooks listen
        elif self._no_sync is not None:
            chunk.finish_grad_sync(force_all_reduce=chunk.force_all_reduce)

    def gather(self, segment: int) -> None:
        """Start to gather the segment's updated parameters, those of its first layers first.

        DDP's hooks wait in the forward, each layer for its own buckets, and gather what is not
        under way.
        """
        if self._gathers:
            last_layer_first = tuple(bucket_groups(self._chunks[segment]))
            for bucket_group in reversed(last_layer_first):
                if not bucket_group.param_gather_dispatched:
                    bucket_group.start_param_sync()

    def _hush(self, segment: int) -> None:
        if self._no_sync is not None:
            self._quiet[segment].enter_context(self._no_sync[segment]())


def _reduced_by_hooks(bucket_group: Any) -> bool:
    """Whether DDP's hooks have started the reduction: all gradients came as often as they should.

    The first iteration counts how often that is; hooks start nothing in it.
    """
    return bool(
        not bucket_group.is_first_batch
        and bucket_group.per_param_grad_ready_counts
        == bucket_group.golden_per_param_grad_ready_counts
    )


def _reduced_when_finished(bucket_group: Any) -> bool:
    """Whether ``finish_grad_sync`` starts the reduction itself, even if somebody has before.

    It does so as long as hooks only count, unless it finds the handle of a reduction. Several
    instances of the distributed optimizer wait for a stream and keep no handles.
    """
    return bool(
        bucket_group.is_first_batch
        and bucket_group.ddp_config.num_distributed_optimizer_instances > 1
    )


def _forget_partial_counts(bucket_group: Any) -> None:
    """Let DDP go on counting where some parameter has no gradient, and its hook never comes.

    It would wait for all hooks from the second iteration on. Multi-token prediction leaves the last
    stage's output layer unused where embeddings are tied.
    """
    counts = bucket_group.per_param_grad_ready_counts
    if bucket_group.is_first_batch and len(counts) < len(bucket_group.params):
        counts.clear()


def _per_chunk(
    function: Any, chunks: Sequence[torch.nn.Module]
) -> Sequence[Callable[..., Any]] | None:
    """Megatron keeps one function per chunk, a bare one for a single chunk, or None."""
    if function is None or isinstance(function, list):
        return function
    return [function] * len(chunks)
