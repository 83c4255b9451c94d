"""Streams and events of a device that runs its work in the order of issue."""

import time

import pytest
import torch

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_the_time_between_events_is_the_hosts_in_milliseconds() -> None:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    end.record(torch.cuda.current_stream())
    end.synchronize()
    assert end.query()
    assert 20 <= start.elapsed_time(end) < 1000


def test_streams_wait_for_nothing() -> None:
    stream = torch.cuda.Stream(device=torch.cuda.current_device(), priority=-1)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        stream.wait_event(stream.record_event())
    stream.synchronize()
    torch.cuda.synchronize()
    assert not torch.cuda.is_current_stream_capturing()


def test_questions_about_the_device_have_an_answer() -> None:
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
    assert torch.cuda.get_device_properties(0).major == torch.cuda.get_device_capability()[0]
