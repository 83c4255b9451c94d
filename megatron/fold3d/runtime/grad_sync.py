"""DP.sync, one segment at a time, through the functions that Megatron's DDP gives its schedules.

Keeps one invariant: within an iteration a segment's gradients are reduced once, either by DDP's
hooks inside its last backward or by an explicit start after it, never by both. A segment whose
DP.sync reaches into the next iteration is `DeferredSync`'s.
"""

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch

from megatron.fold3d.runtime.deferred_sync import DeferredSync


class GradSync:
    """Gradient reduction and parameter gathering of the model chunks of one rank.

    As a context manager it spans one iteration and keeps DDP's hooks quiet; a segment whose last
    backward is about to run is released by `release`, and `reduce` starts what hooks do not.
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
        self._chunks = chunks
        self._deferred = deferred
        self._deferred_segments = deferred_segments if deferred is not None else ()
        self._quiet = [ExitStack() for _ in chunks]
        self._no_sync = _per_chunk(config.no_sync_func, chunks)
        # Megatron sets these when launches are to be aligned over pipeline ranks; it leaves them
        # out when hooks launch, and when only forwards run.
        self._start_reduce = _per_chunk(config.grad_sync_func, chunks) if trains else None
        self._start_gather = _per_chunk(config.param_sync_func, chunks) if trains else None

    def __enter__(self) -> Self:
        for segment in range(len(self._chunks)):
            self._hush(segment)
        return self

    def __exit__(self, *_: object) -> None:
        for quiet in self._quiet:
            quiet.close()

    def release(self, segment: int) -> None:
        """Let hooks reduce the gradients that become ready from now on: the last micro-batch's."""
        if self._start_reduce is None and segment not in self._deferred_segments:
            self._quiet[segment].close()

    def reduce(self, segment: int) -> None:
        """Start to reduce the segment's gradients, unless its hooks have."""
        self._quiet[segment].close()
        if self._deferred is not None and segment in self._deferred_segments:
            self._deferred.start(self._chunks[segment])
        elif self._start_reduce is not None:
            self._start_reduce[segment](self._chunks[segment].parameters())

    def wait(self, segment: int) -> None:
        """End the reduction that the iteration before started; without one there is none to end.

        Of the other segments Megatron's ``finalize_model_grads`` waits for all at once.
        """
        if self._deferred is not None and segment in self._deferred_segments:
            self._deferred.settle(self._chunks[segment])
            self._quiet[segment].close()
            self._hush(segment)  # zeroed gradients are a new start for DDP, and its hooks listen

    def gather(self, segment: int) -> None:
        """Start to gather the segment's updated parameters, if it exists and hooks do not."""
        if self._start_gather is not None and segment < len(self._chunks):
            self._start_gather[segment](self._chunks[segment].parameters())

    def _hush(self, segment: int) -> None:
        if self._no_sync is not None:
            self._quiet[segment].enter_context(self._no_sync[segment]())


def _per_chunk(
    function: Any, chunks: Sequence[torch.nn.Module]
) -> Sequence[Callable[..., Any]] | None:
    """Megatron keeps one function per chunk, a bare one for a single chunk, or None."""
    if function is None or isinstance(function, list):
        return function
    return [function] * len(chunks)
