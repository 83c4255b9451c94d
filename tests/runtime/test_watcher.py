"""Times on a device that runs behind the host: without timed events, callbacks or waits."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron.fold3d.runtime import device as fold3d_device
from megatron.fold3d.runtime.device import call_when_done, mark_now
from megatron.fold3d.runtime.watcher import Watcher

CPU = torch.device("cpu")


class Streams:
    """One stream, whose events pass when the test says so; none has a time."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def current_stream(self) -> str:
        return "compute"

    def Event(self, *, enable_timing: bool = False) -> "Event":  # noqa: N802  (as in torch.cuda)
        assert not enable_timing, "behind a collective a timed event stops the hardware queue"
        self.events.append(Event())
        return self.events[-1]


class Event:
    def __init__(self) -> None:
        self.is_over = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.is_over


class Collective:
    """As one of NCCL: a callback would run at once, on a stream that waits for it."""

    def __init__(self) -> None:
        self.is_over = False

    def get_future(self) -> Any:
        raise AssertionError("a callback makes a stream of torch's pool wait")

    def is_completed(self) -> bool:
        return self.is_over


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    streams = Streams()
    monkeypatch.setitem(fold3d_device.STREAMS, "cpu", streams)
    return streams


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(1e-4)


def test_a_mark_has_the_time_at_which_the_device_passed_it(streams: Streams) -> None:
    begin, end = mark_now(CPU), mark_now(CPU)
    first, second = streams.events
    first.is_over = True
    until(lambda: begin._passed_s is not None)  # the thread has seen it, without being asked
    assert end.passed_s is None
    time.sleep(0.05)
    second.is_over = True
    until(lambda: end._passed_s is not None)
    time.sleep(0.05)
    assert 0.05 <= end.after_s(begin) < 20


def test_the_end_of_collectives_is_seen_without_a_callback(streams: Streams) -> None:
    works, ends = [Collective(), Collective()], []
    assert call_when_done(works, lambda: ends.append(mark_now(CPU)), CPU)
    works[0].is_over = True
    time.sleep(0.01)
    assert not ends
    works[1].is_over = True
    until(lambda: bool(ends))
    assert ends[0].passed_s is not None
    assert not streams.events  # a mark there is the moment itself, and launches nothing


def test_the_thread_ends_when_nothing_is_left_and_begins_again() -> None:
    begun: list[str] = []
    watcher = Watcher(lambda: begun.append(threading.current_thread().name))
    seen: list[bool] = []
    for number in (40, 80):  # more than are asked at a time
        are_over = threading.Event()  # else the thread may end between two of them
        for line in range(40):
            watcher.when(line, are_over.is_set, lambda: seen.append(watcher.is_current))
        are_over.set()
        until(lambda: watcher._thread is None)
        assert seen == [True] * number
    assert begun == ["watcher", "watcher"]
    assert not watcher.is_current
