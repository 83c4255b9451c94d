"""Copies between a device and host memory that overlap compute, on one stream per direction.

Keeps one order: a copy begins when all work issued earlier to the compute stream has run, and work
issued after `wait` begins only when the copy is done. So once the compute stream has waited for a
copy, later work may free or overwrite its memory on either side without further events.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from megatron.fold3d.runtime.device import runs_behind, streams_of
from megatron.fold3d.runtime.offload.offload_library import batched_copy

Tensors = Sequence[torch.Tensor]
Watch = Callable[[], AbstractContextManager[object]]


class Copies:
    """The copy engine of one rank.

    Args:
        device: the compute device; it must be current when the first copy is made. On a CPU every
            copy is done when its call returns.
    """

    def __init__(self, device: torch.device, batch: int = 64) -> None:
        self.num_calls = self.num_tensors = 0
        self._backend = streams_of(device)
        self._runs_behind = runs_behind(device)
        self._batch = batch

    @cached_property
    def _streams(self) -> tuple[Any, Any]:
        return self._backend.Stream(), self._backend.Stream()

    def to_host(self, targets: Tensors, sources: Tensors, watch: Watch = nullcontext) -> Any:
        """Start to copy device tensors to host memory; return an event for `wait`.

        The sources must be valid on the current stream. The targets are valid on a stream that
        has waited for the event, and on the host once the event has passed.

        Args:
            targets: contiguous tensors in page-locked host memory.
            sources: as many device tensors of the same shapes and dtypes. The caller owns both,
                and keeps them alive and unchanged until the copy is done.
            watch: returns a context, entered when the copy begins and left when it ends, both times
                with the copy's stream current.
        """
        return self._copy(self._streams[0], targets, sources, watch)

    def to_device(
        self,
        targets: Tensors,
        sources: Tensors,
        watch: Watch = nullcontext,
        after: Any = None,
        ready: Any = None,
    ) -> Any:
        """Start to copy host tensors to the device; arguments as in `to_host`.

        Args:
            targets: device tensors; memory that the current stream may write.
            sources: as many tensors in host memory, complete once ``after`` has passed.
            after: the event of another copy, which this one waits for.
            ready: an event of the compute stream; the copy waits only for work issued before it.
        """
        if after is not None:
            self._streams[1].wait_event(after)
        return self._copy(self._streams[1], targets, sources, watch, ready)

    def now(self) -> Any:
        """Record an event on the current stream, for ``ready``."""
        event = self._backend.Event()
        event.record()
        return event

    def wait(self, copied: Any) -> None:
        """Make the current stream wait for a copy's event; the host does not wait."""
        self._backend.current_stream().wait_event(copied)

    def _copy(
        self, stream: Any, targets: Tensors, sources: Tensors, watch: Watch, ready: Any = None
    ) -> Any:
        targets, sources = tuple(targets), tuple(sources)
        if ready is None:
            stream.wait_stream(self._backend.current_stream())
        else:
            stream.wait_event(ready)
        with self._backend.stream(stream):
            with watch():
                for start in range(0, len(targets), self._batch):
                    end = start + self._batch
                    self._launch(targets[start:end], sources[start:end], stream)
                    self.num_calls += 1
            self.num_tensors += len(targets)
            return self.now()

    def _launch(
        self, targets: tuple[torch.Tensor, ...], sources: tuple[torch.Tensor, ...], stream: Any
    ) -> None:
        if self._runs_behind:
            batched_copy(targets, sources, stream.cuda_stream)
        else:
            torch._foreach_copy_(targets, sources)
