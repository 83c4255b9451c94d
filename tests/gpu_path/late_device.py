"""A device whose streams are threads with random delays: what a GPU does to order, on CPU tensors.

The host launches items: batches of operators, copies, communication. An item starts when its
stream's predecessor and its events are over and when everything launched before it in its hardware
queue has started, and then takes a random time, which the seed decides.

Memory that `Memory.take` returns is filled with NaN when its last reference has gone and the work
launched until then is over: CUDA's caching allocator would give it to the next operator there.
"""

import functools
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from tests.gpu_path.happens_before import Bytes, Clock, HappensBefore, caller

HANG_S = 30.0
IDLE_S = 0.1  # the longest that an item lies there because nobody waits for it
_ALIGNMENT = 64  # as torch's own allocator: kernels may depend on it
_BATCH = 128  # operators per item

Run = Callable[[], None]


class HangError(RuntimeError):
    """An item has not started or ended in time."""


@dataclass(frozen=True, slots=True)
class Delays:
    """How late items are: each with a chance of ``share``, by up to ``longest_s``.

    ``always`` makes all of one side as late as can be, and the other not at all: the compute
    stream, or all others. An item of that side starts when somebody waits for it, or after
    `IDLE_S`, and then takes ``longest_s``.
    """

    seed: int = 0
    share: float = 0.3
    longest_s: float = 0.004
    always: Literal["compute", "others"] | None = None


class Item:
    """Something launched on a stream; ``ended_s`` is on the host's clock."""

    def __init__(
        self,
        run: Run | None,
        waits: Sequence["Item"],
        delay_s: float,
        *,
        is_lazy: bool = False,
        label: str = "",
    ) -> None:
        self._label = label
        self._run, self._waits, self._delay_s = run, waits, delay_s
        self.clock: Clock = {}
        self._over, self._asked_for = threading.Event(), threading.Event()
        if not is_lazy:
            self._asked_for.set()
        self.ended_s = 0.0
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def ask_for(self) -> None:
        """Let it start, and what it waits for."""
        asked = [self]
        while asked:
            item = asked.pop()
            asked += [other for other in item._waits if not other._asked_for.is_set()]
            item._asked_for.set()

    def wait(self) -> None:
        self.ask_for()
        if not self._over.wait(HANG_S):
            raise HangError(f"waited for {self._label} for {HANG_S:.0f} s")
        if self.error is not None:
            raise self.error

    def wait_until_ready(self) -> None:
        self._asked_for.wait(IDLE_S)
        for item in self._waits:
            item.wait()
        self._waits = ()

    def run(self) -> None:
        if self._delay_s:
            time.sleep(self._delay_s)
        if self._run is not None:
            self._run()
            self._run = None

    def end(self, error: BaseException | None = None) -> None:
        self.error, self.ended_s = error, time.perf_counter()
        self._over.set()


class Worker:
    """A thread that runs calls in order."""

    def __init__(self, name: str) -> None:
        self._calls: deque[Run] = deque()
        self._some = threading.Semaphore(0)
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def add(self, call: Run) -> None:
        self._calls.append(call)
        self._some.release()

    def _loop(self) -> None:
        torch.set_num_threads(1)
        while True:
            self._some.acquire()
            self._calls.popleft()()


class Stream:
    """Items that run one after the other; has the methods of ``torch.cuda.Stream`` that we use."""

    def __init__(self, device: "LateDevice", name: str) -> None:
        self._device, self._name = device, name
        self.number = device.order.new_stream(name)
        self.launched = 0
        self._worker = Worker(name)
        self._queue = device.hardware_queue()
        device.streams.append(self)
        self.last: Item | None = None

    @property
    def cuda_stream(self) -> "Stream":
        return self

    def launch(self, run: Run | None, after: Sequence[Item] = ()) -> Item:
        self._device.flush()
        return self.launch_behind_batch(run, after)

    def launch_behind_batch(self, run: Run | None, after: Sequence[Item] = ()) -> Item:
        with self._device.launching:
            previous = () if self.last is None else (self.last,)
            delay_s = self._device.delay_s(self) if run else 0.0
            is_lazy = bool(delay_s) and self._device.delays.always is not None
            waits = (*previous, *after)
            item = Item(run, waits, delay_s, is_lazy=is_lazy, label=self._name)
            self.launched += 1
            clocks = [other.clock for other in waits]
            item.clock = self._device.order.launched(self.number, self.launched, clocks)
            self.last = item
            self._queue.add(functools.partial(self._start, item))
        return item

    def _start(self, item: Item) -> None:
        """Wait, in the hardware queue's thread, until the item may start; then start it."""
        try:
            item.wait_until_ready()
        except BaseException as error:  # noqa: BLE001  (whoever waits for the item raises it)
            item.end(error)
            return
        self._worker.add(functools.partial(self._run, item))

    def _run(self, item: Item) -> None:
        try:
            with torch._C._AutoDispatchBelowAutograd():
                item.run()
        except BaseException as error:  # noqa: BLE001  (whoever waits for the item raises it)
            item.end(error)
        else:
            item.end()

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self._device)
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        if event.item is None:
            return
        device = self._device
        if (
            self is device.compute
            and threading.get_ident() == device.host
            and not device.runs_ahead
        ):
            device.host_waits(event.item)  # the host's operators run at once: it must not go on
        else:
            self.launch(None, [event.item])

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self._device.flush()
        if self.last is not None:
            self._device.host_waits(self.last)


class Event:
    """A moment on a stream; has the methods of ``torch.cuda.Event`` that we use."""

    def __init__(self, device: "LateDevice", *, enable_timing: bool = False) -> None:
        self._device = device
        self._recorded_s = 0.0
        self.item: Item | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._device.current_stream()
        self._device.flush()
        self.item, self._recorded_s = stream.last, time.perf_counter()

    def query(self) -> bool:
        if self.item is None:
            return True
        if self.item.is_over:
            self._device.order.host_waited(self.item.clock)
        return self.item.is_over

    def synchronize(self) -> None:
        if self.item is not None:
            self._device.host_waits(self.item)

    def elapsed_time(self, end: "Event") -> float:
        return (end._moment_s - self._moment_s) * 1e3

    @property
    def _moment_s(self) -> float:
        assert self.query()
        return max(self._recorded_s, self.item.ended_s if self.item else 0.0)


class LateDevice:
    """The device of one rank, in the shape of ``torch.cuda``: streams, events, the current stream.

    Args:
        delays: of its items.
        num_queues: hardware queues that streams share, in turns.
    """

    def __init__(self, delays: Delays, num_queues: int) -> None:
        self._random = random.Random(delays.seed)
        self.delays = delays
        self.launching = threading.RLock()
        self.order = HappensBefore(self.launching)
        self._queues = [Worker(f"hardware queue {i}") for i in range(num_queues)]
        self.streams: list[Stream] = []
        self._batch: list[Run] = []
        self._local = threading.local()
        self.host = threading.get_ident()
        self.is_queued = False  # whether the host's operators are
        self.memory = Memory(self)
        self.compute: Stream | None = None
        self.compute = Stream(self, "compute")

    def hardware_queue(self) -> Worker:
        return self._queues[len(self.streams) % len(self._queues)]

    def delay_s(self, stream: Stream) -> float:
        if self.delays.always is not None:
            is_compute = stream is self.compute
            return self.delays.longest_s if is_compute == (self.delays.always == "compute") else 0
        late = self._random.random() < self.delays.share
        return self._random.random() * self.delays.longest_s if late else 0.0

    def Stream(self, *_: Any, **__: Any) -> Stream:  # noqa: N802  (as in torch.cuda)
        return Stream(self, "stream")

    def Event(self, *_: Any, **__: Any) -> Event:  # noqa: N802
        return Event(self)

    def current_stream(self, *_: Any) -> Stream:
        return getattr(self._local, "stream", self.compute)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    @property
    def runs_ahead(self) -> bool:
        """True where this thread's operators are queued, so that waiting must be queued too."""
        return self.is_queued and threading.get_ident() == self.host

    def host_waits(self, item: Item) -> None:
        """Block the host until an item is over."""
        item.wait()
        self.order.host_waited(item.clock)

    def queue_operator(
        self,
        run: Run,
        what: str = "",
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor | Bytes] = (),
    ) -> None:
        """Add an operator to the batch that the next launch closes."""
        with self.launching:
            self._batch.append(run)
            self._operator_uses(reads, False, what)
            self._operator_uses(writes, True, what)
            if len(self._batch) >= _BATCH:
                self.flush()

    def flush(self) -> None:
        with self.launching:
            batch, self._batch = self._batch, []
            if batch:
                self.compute.launch_behind_batch(lambda: _call_each(batch))

    def _operator_uses(
        self, tensors: Sequence[torch.Tensor | Bytes], writes: bool, what: str
    ) -> None:
        if tensors:
            stream = self.compute
            before = stream.last.clock if stream.last else None
            self.order.used(
                self._bytes(tensors), writes, stream.number, stream.launched + 1, before, what
            )

    def item_uses(
        self,
        stream: Stream,
        item: Item,
        what: str,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Note what an item does with memory, right behind its launch."""
        index, what = item.clock[stream.number], f"{what}{caller()}"
        for tensors, is_write in ((reads, False), (writes, True)):
            used = self._bytes(tensors)
            self.order.used(used, is_write, stream.number, index, item.clock, what)

    def host_writes(self, tensor: torch.Tensor, what: str) -> None:
        """Note that the host writes memory now."""
        for used in self._bytes([tensor]):
            self.order.host_uses(used, what)

    def _bytes(self, tensors: Sequence[torch.Tensor | Bytes]) -> list[Bytes]:
        found = []
        for tensor in tensors:
            if isinstance(tensor, Bytes):
                found.append(tensor)
                continue
            used = Bytes.of(tensor)
            if used.end:
                if not self.memory.owns(used.storage):
                    self.order.forget_if_freed(tensor)
                found.append(used)
        return found

    def synchronize_compute(self) -> None:
        self.compute.synchronize()

    def copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], stream: Stream
    ) -> None:
        """Copy as `batched_copy` does: on a stream, without keeping the tensors alive."""
        pairs = [
            (self.memory.borrow(target), self.memory.borrow(source))
            for target, source in zip(targets, sources, strict=True)
        ]

        def run() -> None:
            for target, source in pairs:
                target().copy_(source())

        item = stream.launch(run)
        self.item_uses(stream, item, "copy", reads=sources, writes=targets)


def _call_each(runs: list[Run]) -> None:
    runs.reverse()
    while runs:
        runs.pop()()  # and let go of what it holds


class Memory:
    """An allocator whose freed memory turns into NaN where the next operator could reuse it."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._alive: dict[int, np.ndarray] = {}  # by address: all of its memory
        self._emptied: set[int] = set()  # addresses of storages of others

    def take(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor filled with NaN (integers: with -1)."""
        last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        num_bytes = max(0 if 0 in shape else last, 1) * dtype.itemsize
        whole = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        skip = -whole.ctypes.data % _ALIGNMENT
        whole = whole[skip : skip + num_bytes]
        whole.fill(0xFF)
        handed = whole[:]
        address = whole.ctypes.data
        self._alive[address] = whole
        self._device.order.taken(address)
        weakref.finalize(handed, self._free, address).atexit = False
        storage = torch.from_numpy(handed).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(stride))

    def owns(self, address: int) -> bool:
        """Return True if memory at this address was taken here and is not free."""
        return address in self._alive

    def empty_storage(self, address: int) -> bool:
        """Do what ``storage.resize_(0)`` does to memory of ours; False if it is not."""
        whole = self._alive.get(address)
        if whole is not None:
            self._poison(whole)
        return whole is not None

    def resize_storage(self, storage: torch.UntypedStorage, size: int) -> bool:
        """Do what ``storage.resize_`` does to memory of others; False if nothing is queued.

        Work that is queued may still use it, so it is not freed. It holds NaN until it is written
        again.
        """
        address = storage.data_ptr()
        if size == 0 and self._device.is_queued:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._emptied.add(address)
            self._poison(whole)
            return True
        if address in self._emptied:
            self._emptied.remove(address)
            return True
        return False

    def borrow(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that finds the tensor's memory as it then is, without keeping it."""
        shape, stride = tuple(tensor.shape), tensor.stride()
        storage, offset, dtype = tensor.untyped_storage(), tensor.storage_offset(), tensor.dtype
        whole = self._alive.get(storage.data_ptr())
        if whole is not None:
            kept = torch.from_numpy(whole).untyped_storage()
            return lambda: torch.empty(0, dtype=dtype).set_(kept, offset, shape, stride)
        weak, num_bytes = storage._weak_ref(), storage.nbytes()

        def find() -> torch.Tensor:
            found = torch.UntypedStorage._new_with_weak_ptr(weak)
            if found is None or found.nbytes() < num_bytes:  # freed
                return torch.full(shape, -1 if not dtype.is_floating_point else torch.nan).to(dtype)
            return torch.empty(0, dtype=dtype).set_(found, offset, shape, stride)

        return find

    def _free(self, address: int) -> None:
        self._poison(self._alive.pop(address))

    def _poison(self, whole: np.ndarray) -> None:
        def poison() -> None:
            whole.fill(0xFF)

        if self._device.is_queued:
            used = Bytes(whole.ctypes.data, 0, whole.nbytes)
            self._device.queue_operator(poison, f"freed memory{caller()}", writes=(used,))
        else:
            poison()
