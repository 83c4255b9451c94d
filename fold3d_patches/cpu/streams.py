"""Patch ``torch.cuda`` streams and events.

Why: Megatron's DDP, timers and schedules order their work with streams and events.
Change: a CPU runs its work in the order of issue, so every wait is over when it begins; torch has
    such streams for the CPU. Events keep the host's clock, so that elapsed times stay true.
Remove when: Megatron takes streams from ``torch.get_device_module``.
"""

import time
from contextlib import nullcontext
from typing import Any

import torch.cpu

from fold3d_patches.registry import Patch, replace


class HostEvent(torch.cpu.Event):
    """A moment on the host's clock; nothing is ever pending."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end_event: "HostEvent") -> float:
        """Milliseconds until ``end_event``, as CUDA counts them."""
        return (end_event._recorded_s - self._recorded_s) * 1e3


class HostStream(torch.cpu.Stream):
    """The order of issue, under a name."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority: there is one."""
        return (0, 0)

    def record_event(self, event: HostEvent | None = None) -> HostEvent:  # type: ignore[override]
        """Return an event that has passed."""
        event = event or HostEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for nothing."""


_THE_STREAM = HostStream()


def _current_stream(device: Any = None) -> HostStream:
    return _THE_STREAM


def _no_wait(device: Any = None) -> None:
    pass


def patches() -> tuple[Patch, ...]:
    """Streams, events, and the waits for them."""
    return (
        replace("torch.cuda:Stream", HostStream),
        replace("torch.cuda:Event", HostEvent),
        replace("torch.cuda:stream", nullcontext),
        replace("torch.cuda:set_stream", _no_wait),
        replace("torch.cuda:current_stream", _current_stream),
        replace("torch.cuda:default_stream", _current_stream),
        replace("torch.cuda:synchronize", _no_wait),
        replace("torch.cuda:is_current_stream_capturing", lambda: False),
    )
