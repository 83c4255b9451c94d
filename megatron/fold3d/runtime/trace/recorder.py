"""When each action of an iteration begins and ends on this rank's device, with no barrier added.

Keeps one invariant: recording never waits for the device, and reads nothing from it while an
iteration runs. Times are read when a later iteration begins, once the device has passed them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron.fold3d.observe.trace_files import Event, IterationTrace
from megatron.fold3d.runtime.device import (
    Launched,
    Mark,
    call_when_done,
    mark_now,
    peak_device_bytes,
    peak_host_bytes,
)
from megatron.fold3d.runtime.events import Events, no_end

WARM_UP = 3  # iterations in which a run still allocates, connects and compiles


@dataclass(slots=True)
class _Open:
    """An event whose end may be unknown yet."""

    name: str
    kind: str
    start: Mark
    end: Mark | None = None


@dataclass(slots=True)
class _Iteration:
    number: int
    start: Mark
    end: Mark | None = None
    events: list[_Open] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)


class Recorder(Events):
    """Records iterations and delivers each once all its events have ended.

    Args:
        wants: returns True if the iteration of this number is to be recorded.
        deliver: receives each recorded iteration, in order, soon after its end.
    """

    def __init__(
        self,
        device: torch.device,
        wants: Callable[[int], bool],
        deliver: Callable[[IterationTrace], None],
    ) -> None:
        self._device = device
        self._wants = wants
        self._deliver = deliver
        self._now: _Iteration | None = None
        self._waiting: list[_Iteration] = []
        self._zero: tuple[Mark, float] | None = None  # one moment, as a mark and as Unix time

    @property
    def is_on(self) -> bool:
        """True while an iteration is being recorded."""
        return self._now is not None

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Record the events inside this block, if iteration ``number`` is wanted and completed."""
        self.flush()
        if not self._wants(number):
            yield
            return
        start = mark_now(self._device)
        self._zero = self._zero or (start, time.time())
        self._now = now = _Iteration(number, start)
        try:
            yield
            now.end = mark_now(self._device)
            self._waiting.append(now)
        finally:
            self._now = None

    def open_span(self, name: object, kind: str) -> Callable[[], None]:
        """Begin an event, as `Events.open_span` says."""
        if self._now is None:
            return no_end
        event = _Open(str(name), kind, mark_now(self._device))
        self._now.events.append(event)

        def end() -> None:
            event.end = mark_now(self._device)

        return end

    def count(self, name: str, amount: float) -> None:
        """Add ``amount`` to one of the iteration's counters."""
        if self._now is not None:
            self._now.counts[name] = self._now.counts.get(name, 0) + amount

    def collective(
        self, name: object, kind: str, launch: Callable[[], Sequence[Launched]]
    ) -> tuple[Sequence[Launched], Callable[[], None]]:
        """Record a collective until it is done, as `Events.collective` says."""
        if not self.is_on:
            return super().collective(name, kind, launch)
        end = self.open_span(name, kind)
        works = launch()
        if not works:
            end()
        return works, no_end if call_when_done(works, end, self._device) else end

    def flush(self) -> None:
        """Deliver the iterations whose events have all ended."""
        while self._waiting:
            ends = [self._waiting[0].end, *(event.end for event in self._waiting[0].events)]
            if any(end is None or end.passed_s is None for end in ends):
                return
            self._deliver(self._read(self._waiting.pop(0)))

    def close(self) -> None:
        """Deliver the remaining iterations, without events that have not ended."""
        for iteration in self._waiting:
            iteration.events = [event for event in iteration.events if event.end is not None]
        self.flush()

    def _read(self, iteration: _Iteration) -> IterationTrace:
        assert self._zero is not None
        zero, unix_s = self._zero

        def since_start_s(mark: Mark | None) -> float:
            assert mark is not None
            return mark.after_s(iteration.start)

        return IterationTrace(
            iteration=iteration.number,
            start_s=unix_s + iteration.start.after_s(zero),
            end_s=since_start_s(iteration.end),
            events=tuple(
                Event(e.name, since_start_s(e.start), since_start_s(e.end), e.kind)
                for e in iteration.events
            ),
            gpu_memory_bytes=peak_device_bytes(self._device),
            host_memory_bytes=peak_host_bytes(),
            counts=iteration.counts,
        )
