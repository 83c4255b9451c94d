"""Patch ``torch.cuda`` streams and events.

Why: Megatron's DDP, timers and schedules order their work with streams and events.
Change: a CPU runs its work in the order of issue, so every wait is over when it begins. Events
    keep the host clock, so that elapsed times stay true.
Remove when: Megatron uses ``torch.get_device_module``, whose CPU half has the same no-ops.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fold3d_patches.registry import Patch


class Event:
    """A moment on the host clock; nothing is ever pending."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds between the two records, as CUDA counts them."""
        return (end_event._recorded_s - self._recorded_s) * 1e3


class Stream:
    """The order of issue, under a name."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_THE_STREAM = Stream()


def _current_stream(device: Any = None) -> Stream:
    return _THE_STREAM


def _stream(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext(stream)


def _no_wait(device: Any = None) -> None:
    pass


def _not_capturing() -> bool:
    return False


def _replace(name: str, ours: Any) -> Patch:
    def make(_upstream: Any) -> Any:
        return ours

    return Patch(target=f"torch.cuda:{name}", make=make)


def patches() -> tuple[Patch, ...]:
    """Streams, events, and the waits for them."""
    replacements: dict[str, type | Callable[..., Any]] = {
        "Stream": Stream,
        "Event": Event,
        "stream": _stream,
        "set_stream": _no_wait,
        "current_stream": _current_stream,
        "default_stream": _current_stream,
        "synchronize": _no_wait,
        "is_current_stream_capturing": _not_capturing,
    }
    return tuple(_replace(name, ours) for name, ours in replacements.items())
