"""The differences between a GPU and a CPU as devices; the only file that uses ``torch.cuda``.

All streams and events come from `streams_of`. Tests put a device of their own into `STREAMS`.

Keeps one invariant: only `synchronize` makes the host wait for the device.
"""

import functools
import platform
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron.fold3d.runtime.watcher import IsOver, Watcher


class Launched(Protocol):
    """Work that has been started, such as a `dist.Work`."""

    def get_future(self) -> Any:
        """Return a future that is done when the work is done."""

    def is_completed(self) -> bool:
        """Return True if the work is done, without waiting."""

    def wait(self) -> object:
        """Wait for the result, which is then valid on the current stream."""


STREAMS: dict[str, Any] = {"cpu": torch.cpu, "cuda": torch.cuda}
"""The module of streams and events, by the type of a device."""


def streams_of(device: torch.device) -> Any:
    """Return the module that makes a device's streams and events: ``torch.cuda``, ``torch.cpu``.

    It has ``Stream``, ``Event``, ``current_stream``, ``stream`` and ``synchronize``.
    """
    return STREAMS[device.type]


def runs_behind(device: torch.device) -> bool:
    """Return whether calls that issue work to the device return before the work is done."""
    return streams_of(device) is not torch.cpu


@functools.cache
def watcher_of(device: torch.device) -> Watcher:
    """Return the watcher of the calling thread's current device."""
    if device.type != "cuda":
        return Watcher(lambda: None)
    return Watcher(functools.partial(torch.cuda.set_device, torch.cuda.current_device()))


class Mark:
    """A moment in the work issued to a device; once passed, it has a time of the host's clock."""

    __slots__ = ("_is_over", "_passed_s")

    def __init__(self, is_over: IsOver) -> None:
        self._is_over = is_over
        self._passed_s: float | None = None

    def note(self) -> None:
        """Note the current time as the one at which the device passed, unless a time is known."""
        self._passed_s = self._passed_s or time.perf_counter()

    @property
    def passed_s(self) -> float | None:
        """The time at which the device passed this mark; None if it has not."""
        if self._passed_s is None and self._is_over():
            self.note()
        return self._passed_s

    def after_s(self, start: "Mark") -> float:
        """Return the seconds from ``start`` to this mark; the device must have passed both."""
        assert start.passed_s is not None
        assert self.passed_s is not None
        return self.passed_s - start.passed_s


def mark_now(device: torch.device) -> Mark:
    """Record a mark on the current stream; in the watcher's thread, mark this moment.

    A GPU passes the mark when all work issued earlier on the stream is done. A `Watcher` notices
    within about 0.1 ms; its module says why no event is timed.
    """
    if not runs_behind(device) or watcher_of(device).is_current:
        mark = Mark(lambda: True)
        mark.note()
        return mark
    streams = streams_of(device)
    event = streams.Event()
    event.record()
    mark = Mark(event.query)
    watcher_of(device).when(streams.current_stream(), event.query, mark.note)
    return mark


def call_when_done(
    works: Sequence[Launched], end: Callable[[], None], device: torch.device
) -> bool:
    """Call ``end`` when collectives are done, without waiting for them.

    Return False on a CPU if a work has no future, such as the one of gloo's reduce-scatter.
    """
    if not works:
        return True
    if runs_behind(device):
        watcher_of(device).when(end, lambda: all(work.is_completed() for work in works), end)
        return True
    try:
        futures = [work.get_future() for work in works]
    except (AttributeError, RuntimeError):
        return False
    torch.futures.collect_all(futures).add_done_callback(lambda _: end())
    return True


def make_current(device: torch.device) -> None:
    """Make a GPU current in the calling thread; a new thread starts with the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def on_current_stream(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which another thread issues its work to the caller's current stream."""
    streams: Any = streams_of(device)
    on_stream: AbstractContextManager[None] = streams.stream(streams.current_stream(device))
    return on_stream


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all issued work."""
    streams_of(device).synchronize(device)


def device_name(device: torch.device) -> str:
    """Return the model name of the device, as its vendor spells it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def numa_node(device: torch.device) -> int | None:
    """Return the NUMA node that a GPU is attached to, or None if unknown."""
    found: Any = torch.cuda.get_device_properties(device)
    if not hasattr(found, "pci_domain_id"):  # not every torch tells
        return None
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    node = Path(f"/sys/bus/pci/devices/{address}/numa_node")
    number = int(node.read_text()) if node.is_file() else -1
    return number if number >= 0 else None


def device_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU's memory; None on a CPU."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def free_device_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU that a run may take beyond its peak so far; None on a CPU.

    Memory of other processes, of NCCL and of CUDA counts as used. So does memory that the caching
    allocator has reserved, except for whole segments that the peak leaves over: the allocator
    returns these to the driver before it fails. A free piece of a segment that tensors occupy in
    part counts as used, since only a tensor that is no larger than the piece fits into it.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    pieces = torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0)
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    return int(free + max(0, reserved - pieces - peak))


def held_device_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU that tensors hold now; None on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def peak_device_bytes(device: torch.device) -> int | None:
    """Return the most bytes of a GPU that tensors have held at once; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def peak_host_bytes() -> int:
    """Return the most bytes of host memory that this process has held (its peak RSS)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
