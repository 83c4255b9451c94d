"""Uses of memory that nothing orders, whether or not they went wrong this time.

A moment is a stream and the number of an item on it. Everything launched carries a vector clock:
per stream, the last item that is over when this one starts. It knows the item before it on its
stream, what that waits for, and what the host had waited for when it launched it. Two uses of the
same bytes, one of which writes, are a race if the later one's clock does not have the earlier one.

A hardware queue orders only when items start, so it orders no uses. Memory that is freed counts as
written by the stream that owns it, whose next operator may get it.
"""

import functools
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType

import torch

HOST = -1  # the host's own uses, as of a stream
_PLACES = ("megatron/fold3d/runtime/", "fold3d_patches/")
_BETWEEN = (
    *("/torch/", "tests/gpu_path/", "<string>"),
    *("fold3d_patches/cpu/", "fold3d_patches/registry.py"),  # who calls what is patched is beyond
)

Clock = dict[int, int]


class RaceError(AssertionError):
    """Two uses of the same memory are not ordered."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """A range of memory, of one allocation."""

    storage: int
    start: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Bytes":
        """Return the bytes from a tensor's first element to its last."""
        storage = tensor.untyped_storage().data_ptr()
        if tensor.numel() == 0:
            return cls(storage, 0, 0)
        size = tensor.element_size()
        strides = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((length - 1) * stride for length, stride in strides)
        start = tensor.storage_offset() * size
        return cls(storage, start, start + (last + 1) * size)


_Use = tuple[int, int, bool]  # start, end, whether it writes


@dataclass(slots=True)
class _Allocation:
    """The last use of each range by each stream: what is ordered behind it is behind all before."""

    weak: int | None = None  # of a storage that torch frees
    uses: dict[int, dict[_Use, tuple[int, str]]] = field(default_factory=dict)  # by stream


class HappensBefore:
    """The clocks of one rank's streams and host, and the last uses of its memory.

    Args:
        lock: that launches hold, too. Memory may be freed wherever Python collects garbage.
    """

    def __init__(self, lock: "threading.RLock") -> None:
        self.races: dict[str, None] = {}
        self._names: list[str] = []
        self._host: Clock = {HOST: 0}
        self._allocations: dict[int, _Allocation] = {}
        self._lock = lock

    def new_stream(self, name: str) -> int:
        """Return the number of a stream."""
        with self._lock:
            self._names.append(name)
            return len(self._names) - 1

    def launched(self, stream: int, index: int, behind: Iterable[Clock]) -> Clock:
        """Return the clock of an item: what is over when it is over.

        Args:
            stream: whose item it is.
            index: its number there.
            behind: the clocks of the item before it and of those that it waits for.
        """
        with self._lock:
            clock = dict(self._host)
        for other in behind:
            _join(clock, other)
        clock[stream] = index
        return clock

    def host_waited(self, clock: Clock) -> None:
        """Note that the host knows an item to be over; what its watcher sees orders nothing."""
        if threading.current_thread().name == "watcher":
            return
        with self._lock:
            _join(self._host, clock)

    def host_knows(self, stream: int) -> int:
        """Return the number of a stream's last item that the host knows to be over."""
        with self._lock:
            return self._host.get(stream, 0)

    def taken(self, storage: int) -> None:
        """Note an allocation: what used this memory before is over, or freeing it was a race."""
        with self._lock:
            self._allocations[storage] = _Allocation()

    def host_uses(self, used: Bytes, what: str) -> None:
        """Note that the host itself writes memory."""
        with self._lock:
            self._host[HOST] += 1
            self.used((used,), True, HOST, self._host[HOST], self._host, what)

    def used(
        self,
        ranges: Iterable[Bytes],
        writes: bool,
        stream: int,
        index: int,
        behind: Clock | None,
        what: str,
    ) -> None:
        """Note that an item uses memory, and compare it with the uses before.

        Args:
            ranges: what it reads, or writes.
            writes: which of these.
            stream: whose item it is.
            index: its number there.
            behind: the clock before it on its stream; what the host knows is added.
            what: it does, for messages.
        """
        with self._lock:
            for used in ranges:
                allocation = self._allocations.get(used.storage)
                if allocation is None:
                    allocation = self._allocations[used.storage] = _Allocation()
                for other, uses in [*allocation.uses.items()]:
                    if other == stream:
                        continue
                    known = max(self._host.get(other, -1), (behind or {}).get(other, -1))
                    for (start, end, wrote), (number, label) in [*uses.items()]:
                        is_apart = end <= used.start or used.end <= start
                        if number > known and (writes or wrote) and not is_apart:
                            self._note(other, wrote, label, stream, writes, what)
                own = allocation.uses.setdefault(stream, {})
                own[used.start, used.end, writes] = index, what

    def forget_if_freed(self, tensor: torch.Tensor) -> None:
        """Drop the uses of memory that torch itself has freed, and perhaps given out again."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        with self._lock:
            known = self._allocations.get(address)
            if known is not None and known.weak is not None:
                if not torch.UntypedStorage._expired(known.weak):
                    return
                torch.UntypedStorage._free_weak_ref(known.weak)
                known = None
            if known is None:
                self._allocations[address] = _Allocation(weak=storage._weak_ref())

    def check(self) -> None:
        """Return if all uses were ordered.

        Raises:
            RaceError: some were not.
        """
        if self.races:
            raise RaceError("nothing orders\n" + "\n".join(self.races))

    def _note(
        self, other: int, wrote: bool, label: str, stream: int, writes: bool, what: str
    ) -> None:
        def verb(writes: bool) -> str:
            return "writes" if writes else "reads"

        first = f"{label} {verb(wrote)} on {self._name(other)}"
        second = f"{what} {verb(writes)} on {self._name(stream)}"
        self.races[f"  {first}  |  {second}"] = None

    def _name(self, stream: int) -> str:
        return "the host" if stream == HOST else f"stream {self._names[stream]}"


def caller() -> str:
    """Return the line of ours from which this is called, or an empty string."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(40):
        if frame is None:
            break
        if name := _within_ours(frame.f_code.co_filename):
            return f" at {name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.cache
def _within_ours(name: str) -> str:
    found = [place for place in _PLACES if place in name]
    return name[name.index(found[0]) :] if found else ""


def innermost_of_ours() -> str:
    """Return the line that calls torch if it is ours and between the ends of a program.

    Features may wait while they prepare and drain an iteration. A sum in a code may while it is
    waited for, at the end of a program, and once while it measures.
    """
    frame = sys._getframe(1)
    while frame.f_back and any(place in frame.f_code.co_filename for place in _BETWEEN):
        frame = frame.f_back
    name, line = _within_ours(frame.f_code.co_filename), frame.f_lineno
    while frame.f_back:
        if frame.f_code.co_name in ("prepare", "drain", "decide") or (
            frame.f_code.co_qualname in ("_Sum.wait", "CodedSums._measure")
        ):
            return ""
        frame = frame.f_back
    return f"{name}:{line}" if name else ""


def _join(clock: Clock, other: Clock) -> None:
    for stream, index in other.items():
        if clock.get(stream, -1) < index:
            clock[stream] = index
