"""A device whose streams are threads with random delays: what a GPU does to order, on CPU tensors.

The host launches items: batches of operators, copies, communication. An item starts when its
stream's predecessor and its events are over and when everything launched before it in its hardware
queue has started, and then takes a random time, which the seed decides.

Operators run on the current stream, and memory belongs to the stream on which it was allocated:
see `late_memory`.
"""

import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal

import torch

from tests.gpu_path.happens_before import (
    Bytes,
    Clock,
    HappensBefore,
    RaceError,
    caller,
    innermost_of_ours,
)
from tests.gpu_path.late_memory import Memory

HANG_S = 30.0
STANDS_S = 15.0  # the longest that the host stands before a full queue
IDLE_S = 0.1  # the longest that an item lies there because nobody waits for it
_BATCH = 128  # operators per item
LAUNCHES = 1024
"""That a hardware queue holds before the host stops (forums.developer.nvidia.com/t/68937)."""
_POOL = 32
"""Streams that torch hands out in turns, of each priority (c10/cuda/CUDAStream.cpp)."""

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
        queue: "HardwareQueue",
        run: Run | None,
        waits: Sequence["Item"],
        delay_s: float,
        *,
        is_lazy: bool = False,
        label: str = "",
        launches: int = 1,
        holds_queue: bool = False,
    ) -> None:
        self.label, self.launches, self.holds_queue = label, launches, holds_queue
        self.queue, self.waits = queue, deque(waits)
        self.is_asked_for, self.is_first, self.is_over = not is_lazy, False, False
        self.clock: Clock = {}
        self.ended_s = 0.0
        self.error: BaseException | None = None
        self.blocks: list[HardwareQueue] = []  # whose first item waits for it
        self._run, self._delay_s = run, delay_s
        self._waiting: list[Any] = []  # locks of threads

    @property
    def is_only_a_mark(self) -> bool:
        return self._run is None and not self._delay_s

    def ask_for(self) -> None:
        """Let it start, and what it waits for."""
        starter = self.queue.starter
        with starter.lock:
            starter.ask_for(self)
            starter.go_on()

    def wait(self) -> None:
        if not self.is_over:
            over = threading.Lock()
            over.acquire()
            with self.queue.starter.lock:
                if self.is_over:
                    over.release()
                else:
                    self._waiting.append(over)
                    self.ask_for()
            if not over.acquire(timeout=HANG_S):
                raise HangError(f"waited for {self.label} for {HANG_S:.0f} s")
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        if self._delay_s:
            time.sleep(self._delay_s)
        if self._run is not None:
            self._run()
            self._run = None

    def end(self, error: BaseException | None) -> None:
        self.error, self.ended_s = error, time.perf_counter()
        self.is_over = True
        for over in self._waiting:
            over.release()


class HardwareQueue:
    """Starts items in the order of their launch; see `Stream.launch` for when the host stops.

    ``host_stands`` is whether the host has stopped, now or the last time that it launched here.
    """

    def __init__(self, starter: "Starter", limit: int) -> None:
        self.starter, self._limit = starter, limit
        self.host_stands = False
        self.items: deque[Item] = deque()  # that have not started
        self._waiting = 0  # launches
        self._held_by: Item | None = None
        self._changed = threading.Condition(starter.lock)

    def add(self, item: Item) -> None:
        with self.starter.lock:
            self._waiting += item.launches
            self.items.append(item)
            if self.items[0] is item:
                self.starter.go_on(self)

    def start_first(self) -> Item | None:
        """Take the first item off, if it may start."""
        if not self.items or (self._held_by is not None and not self._held_by.is_over):
            return None
        item, starter = self.items[0], self.starter
        if not item.is_asked_for:
            if not item.is_first:
                item.is_first = True
                starter.ask_later(item)
            return None
        while item.waits and item.error is None:
            other = item.waits[0]
            if not other.is_over:
                starter.ask_for(other)
                other.blocks.append(self)
                return None
            item.error = other.error
            item.waits.popleft()
        item.waits.clear()
        self.items.popleft()
        self._waiting -= item.launches
        self._changed.notify_all()
        if item.holds_queue:
            self._held_by = item
            item.blocks.append(self)
        return item

    def wait_for_room(self) -> None:
        with self._changed:
            self.host_stands = self._waiting >= self._limit
            if not self._changed.wait_for(lambda: self._waiting < self._limit, STANDS_S):
                raise HangError(f"{self._waiting} launches wait, and none starts: the host stands")


class Starter:
    """Starts the items of all queues as soon as they may, in as few threads as that takes.

    A thread that has run an item goes on with what waited for it: to wake another costs more than
    most items do.

    Args:
        lock: held wherever items change. Memory may be freed, and that launched, while it is held.
    """

    def __init__(self, lock: "threading.RLock") -> None:
        self.lock = lock
        self._queues: deque[HardwareQueue] = deque()  # whose first item may start now
        self._started: deque[Item] = deque()
        self._is_starting = False
        self._handed_over: SimpleQueue[Item] = SimpleQueue()
        self._num_idle = 0  # threads to which no item has been handed over

    def go_on(self, *queues: HardwareQueue) -> None:
        """Start what may start, in threads that have nothing to do."""
        for item in self._start(*queues):
            self._hand_over(item)

    def ask_for(self, item: Item) -> None:
        """Let an item start, and what it waits for, when the caller goes on."""
        asked = [item]
        while asked:
            item = asked.pop()
            asked += [other for other in item.waits if not other.is_asked_for]
            if not item.is_asked_for:
                item.is_asked_for = True
                self._queues.append(item.queue)

    def ask_later(self, item: Item) -> None:
        """Let an item start after a while."""
        clock = threading.Timer(IDLE_S, item.ask_for)
        clock.daemon = True
        clock.start()

    def _run(self, item: Item) -> Item | None:
        """Run an item; return one that may start behind it."""
        error: BaseException | None = None
        try:
            with torch._C._AutoDispatchBelowAutograd():
                item.run()
        except BaseException as caught:  # noqa: BLE001  (whoever waits for the item raises it)
            error = caught
        with self.lock:
            self._end(item, error)
            following, *others = [*self._start()] or [None]
            for other in others:
                self._hand_over(other)
        return following

    def _start(self, *queues: HardwareQueue) -> Iterator[Item]:
        self._queues.extend(queues)
        if not self._is_starting:  # else whoever does sees them
            self._is_starting = True
            while self._queues:
                queue = self._queues.popleft()
                while (item := queue.start_first()) is not None:
                    if item.error is not None or item.is_only_a_mark:
                        self._end(item, item.error)
                    else:
                        self._started.append(item)
            self._is_starting = False
        while self._started:
            yield self._started.popleft()

    def _end(self, item: Item, error: BaseException | None) -> None:
        item.end(error)
        self._queues.extend(item.blocks)
        item.blocks.clear()

    def _hand_over(self, item: Item) -> None:
        self._handed_over.put(item)
        if self._num_idle:
            self._num_idle -= 1
        else:
            threading.Thread(target=self._work, name="device", daemon=True).start()

    def _work(self) -> None:
        torch.set_num_threads(1)
        while True:
            item: Item | None = self._handed_over.get()
            while item is not None:
                item = self._run(item)
            with self.lock:
                self._num_idle += 1


class Stream:
    """Items that run one after the other; has the methods of ``torch.cuda.Stream`` that we use."""

    def __init__(self, device: "LateDevice", name: str, queue: HardwareQueue | None = None) -> None:
        self._device, self._name = device, name
        self.number = device.order.new_stream(name)
        self.launched = 0
        self.queue = queue or device.hardware_queue()
        device.streams.append(self)
        self.last: Item | None = None

    @property
    def cuda_stream(self) -> "Stream":
        return self

    def launch(self, run: Run | None, after: Sequence[Item] = (), what: str = "") -> Item:
        """Launch one item, behind the operators that are still to be launched.

        The host stops while the stream's hardware queue is full. It holds CUDA's lock then, so no
        other thread launches anything (the stacks of NVIDIA/nccl#1766).
        """
        with self._device.host_lock:
            self._device.flush()
            self.queue.wait_for_room()
            return self.launch_at_once(run, after, what)

    def launch_at_once(
        self,
        run: Run | None,
        after: Sequence[Item] = (),
        what: str = "",
        *,
        launches: int = 1,
        holds_queue: bool = False,
    ) -> Item:
        device = self._device
        with device.launching:
            previous = () if self.last is None else (self.last,)
            delay_s = device.delay_s(self) if run else 0.0
            waits = (*previous, *after)
            item = Item(
                self.queue,
                run,
                waits,
                delay_s,
                is_lazy=bool(delay_s) and device.delays.always is not None,
                label=f"{what} on {self._name}",
                launches=launches,
                holds_queue=holds_queue,
            )
            self.launched += 1
            clocks = [other.clock for other in waits]
            item.clock = device.order.launched(self.number, self.launched, clocks)
            self.last = item
            self.queue.add(item)
        return item

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self._device)
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        if event.item is None:
            return
        device = self._device
        if device.runs_at_once and self is device.current_stream():
            device.host_waits(event.item)  # what the host does next is on this stream
        else:
            self.launch(None, [event.item])

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self._device.note_host_wait()
        self.finish()

    def finish(self) -> None:
        """Let the host wait where a GPU's would not."""
        self._device.flush()
        if self.last is not None:
            self._device.host_waits(self.last)


class Event:
    """A moment on a stream; has the methods of ``torch.cuda.Event`` that we use.

    With ``enable_timing`` its hardware queue starts nothing more until the event has passed: behind
    a collective it holds up computation where streams share a queue (pytorch#143890,
    TransformerEngine#1353).
    """

    def __init__(self, device: "LateDevice", *, enable_timing: bool = False) -> None:
        self._device, self._has_time = device, enable_timing
        self._recorded_s = 0.0
        self.item: Item | None = None

    def record(self, stream: Stream | None = None) -> None:
        device = self._device
        stream = stream or device.current_stream()
        device.flush()
        if self._has_time:
            device.note_stall("a timed event", stream)
            with device.host_lock:
                stream.queue.wait_for_room()
                stream.launch_at_once(None, what="timed event", holds_queue=True)
        self.item, self._recorded_s = stream.last, time.perf_counter()

    def query(self) -> bool:
        if self.item is None:
            return True
        if self.item.is_over:
            self._device.order.host_waited(self.item.clock)
        return self.item.is_over

    def synchronize(self) -> None:
        self._device.note_host_wait()
        if self.item is not None:
            self._device.host_waits(self.item)

    def elapsed_time(self, end: "Event") -> float:
        if not (self._has_time and end._has_time):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return (end._moment_s - self._moment_s) * 1e3

    @property
    def _moment_s(self) -> float:
        assert self.query()
        return max(self._recorded_s, self.item.ended_s if self.item else 0.0)


class Future:
    """What the works of NCCL return: done when launched, and right on a stream that waits.

    A callback runs at once in the calling thread, on a stream of torch's pool that waits for the
    works first (``ATen/core/ivalue_inl.h``: ``invokeCallback``).
    """

    def __init__(self, device: "LateDevice", items: Sequence[Item]) -> None:
        self._device, self._items = device, items

    def done(self) -> bool:
        return True

    def add_done_callback(self, call: Callable[["Future"], None]) -> None:
        stream = self._device.from_pool("callback")
        wait = stream.launch(None, self._items, "callback")
        self._device.note_stall("a callback", stream, wait)
        with self._device.stream(stream):
            call(self)

    @classmethod
    def all_of(cls, futures: Sequence["Future"]) -> "Future":
        """Return what ``torch.futures.collect_all`` does, as far as streams can see."""
        return cls(futures[0]._device, [item for future in futures for item in future._items])


class LateDevice:
    """The device of one rank, in the shape of ``torch.cuda``: streams, events, the current stream.

    Args:
        delays: of its items.
        num_queues: hardware queues that streams share, in turns.
        launches: that a hardware queue holds.

    Attributes:
        hosts: the host's threads whose operators are queued.
        host_lock: held by the host's thread that launches.
        launching: held for a moment, by any thread.
        stalls: what held up the hardware queue that all streams share, though computation waits for
            nothing of the kind.
    """

    def __init__(self, delays: Delays, num_queues: int, launches: int = LAUNCHES) -> None:
        self._random = random.Random(delays.seed)
        self.delays = delays
        self.host_lock, self.launching = threading.RLock(), threading.RLock()
        self.order = HappensBefore(self.launching)
        self.starter = Starter(self.launching)
        self._queues = [HardwareQueue(self.starter, launches) for _ in range(num_queues)]
        self._pools: dict[bool, list[Stream]] = {False: [], True: []}
        self._taken = {False: 0, True: 0}
        self._communication: dict[int, dict[int, str]] = {}  # by stream: what, by item
        self.stalls: dict[str, None] = {}
        self.host_waits_of_ours: dict[str, None] = {}
        self.streams: list[Stream] = []
        self._batches: dict[Stream, list[Run]] = {}
        self._current: dict[int, Stream] = {}  # by thread
        self.hosts = {threading.get_ident()}
        self.is_queued = False  # whether the host's operators are
        self.memory = Memory(self)
        self.compute: Stream | None = None
        self.compute = Stream(self, "compute")

    def hardware_queue(self) -> HardwareQueue:
        return self._queues[len(self.streams) % len(self._queues)]

    def delay_s(self, stream: Stream) -> float:
        if self.delays.always is not None:
            is_compute = stream is self.compute
            return self.delays.longest_s if is_compute == (self.delays.always == "compute") else 0
        late = self._random.random() < self.delays.share
        return self._random.random() * self.delays.longest_s if late else 0.0

    def from_pool(self, name: str, *, is_first: bool = False) -> Stream:
        """Return the next stream of torch's pool: after `_POOL` others it is in use twice."""
        with self.launching:
            pool, number = self._pools[is_first], self._taken[is_first] % _POOL
            self._taken[is_first] += 1
            if number == len(pool):
                pool.append(Stream(self, name))
            return pool[number]

    def Stream(self, *_: Any, priority: int = 0, **__: Any) -> Stream:  # noqa: N802  (as in torch.cuda)
        return self.from_pool("stream", is_first=priority < 0)

    def Event(self, *, enable_timing: bool = False, **_: Any) -> Event:  # noqa: N802
        return Event(self, enable_timing=enable_timing)

    def communicates(self, stream: Stream, item: Item, what: str) -> None:
        """Note that an item is communication, for `note_stall`."""
        self._communication.setdefault(stream.number, {})[item.clock[stream.number]] = what

    def note_stall(self, what: str, stream: Stream, item: Item | None = None) -> None:
        """Note that the one queue stops until a stream, or its last item, is over.

        It matters if that is behind communication for which computation has not waited.
        """
        if len(self._queues) > 1 or (item := item or stream.last) is None:
            return
        known = dict(self.compute.last.clock) if self.compute.last else {}
        for number, index in item.clock.items():
            behind = self._communication.get(number, {})
            waited = max(known.get(number, 0), self.order.host_knows(number))
            if late := [name for at, name in behind.items() if waited < at <= index]:
                self.stalls[f"{what} behind {late[-1]}{caller()}"] = None

    def current_stream(self, *_: Any) -> Stream:
        return self._current.get(threading.get_ident(), self.compute)

    def set_stream(self, stream: Stream) -> None:
        self._current[threading.get_ident()] = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self.set_stream(stream)
        if self.runs_at_once:
            stream.finish()
        try:
            yield
        finally:
            self.set_stream(before)

    @property
    def runs_ahead(self) -> bool:
        """True where this thread's operators are queued, so that waiting must be queued too."""
        return self.is_queued and threading.get_ident() in self.hosts

    @property
    def runs_at_once(self) -> bool:
        """True where this thread's operators run when they are called: outside an iteration."""
        return not self.is_queued and threading.get_ident() in self.hosts

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
        stream: "Stream | None" = None,
        stops: bool = True,
    ) -> None:
        """Add an operator to the batch of its stream, which the next launch closes.

        The stream is the current one (c10's ``getCurrentCUDAStream``, on which kernels are
        launched), unless it is given. The host stops if its hardware queue is full, as with
        `Stream.launch`, unless told not to.
        """
        with self.launching:
            stream = stream or self.current_stream()
            batch = self._batches.setdefault(stream, [])
            batch.append(run)
            self._operator_uses(stream, reads, False, what)
            self._operator_uses(stream, writes, True, what)
            is_full = len(batch) >= _BATCH
        if is_full and stops:
            with self.host_lock:
                stream.queue.wait_for_room()
                self.flush()

    def flush(self) -> None:
        """Launch the batches of all streams. Nothing orders them, or one would have been closed."""
        with self.launching:
            batches, self._batches = self._batches, {}
            for stream, batch in batches.items():
                run = functools.partial(_call_each, batch)
                stream.launch_at_once(run, what="operators", launches=len(batch))

    def _operator_uses(
        self, stream: Stream, tensors: Sequence[torch.Tensor | Bytes], writes: bool, what: str
    ) -> None:
        if tensors:
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

    def synchronize(self, *_: Any) -> None:
        """Wait for all streams, as ``torch.cuda.synchronize`` does."""
        self.note_host_wait()
        for stream in [*self.streams]:
            stream.finish()

    def note_host_wait(self) -> None:
        """Note that an action of a program makes the host wait for the device.

        This is what ``torch.cuda.set_sync_debug_mode`` reports: the host then cannot launch ahead.
        """
        if self.runs_ahead and (place := innermost_of_ours()):
            self.host_waits_of_ours[place] = None

    def check(self) -> None:
        """Return if all uses of memory were ordered, and neither host nor queue was held up.

        Raises:
            RaceError: some were not, or one was.
        """
        self.order.check()
        for what, places in (
            ("the host waits", self.host_waits_of_ours),
            ("the one queue stops", self.stalls),
        ):
            if places:
                raise RaceError(f"{what}\n  " + "\n  ".join(places))

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
