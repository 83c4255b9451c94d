"""Races are reported whether or not they went wrong, and ordered uses are not."""

import pytest
import torch

from tests.gpu_path.happens_before import RaceError
from tests.gpu_path.late_device import Delays, Item, LateDevice, Stream


@pytest.fixture
def device() -> LateDevice:
    return LateDevice(Delays(share=0.0), 64)


def write(device: LateDevice, stream: Stream, *tensors: torch.Tensor, after: Item | None) -> Item:
    item = stream.launch(None, [after] if after else ())
    device.item_uses(stream, item, "write", writes=tensors)
    return item


def test_two_writes_that_nothing_orders_are_a_race(device: LateDevice) -> None:
    buffer, one, two = torch.zeros(8), device.Stream(), device.Stream()
    write(device, one, buffer, after=None)
    write(device, two, buffer, after=None)
    with pytest.raises(RaceError, match=r"write writes on stream stream  \|  write writes"):
        device.order.check()


def test_an_event_orders_two_streams_and_all_that_was_before_it(device: LateDevice) -> None:
    buffer, streams = torch.zeros(8), [device.Stream() for _ in range(3)]
    first = write(device, streams[0], buffer, after=None)
    second = write(device, streams[1], after=first)
    write(device, streams[2], buffer, after=second)
    device.order.check()


def test_what_the_host_has_waited_for_is_before_all_that_it_launches(device: LateDevice) -> None:
    buffer, one, two = torch.zeros(8), device.Stream(), device.Stream()
    device.host_waits(write(device, one, buffer, after=None))
    write(device, two, buffer, after=None)
    device.order.check()


def test_parts_of_a_buffer_and_reads_alone_are_no_race(device: LateDevice) -> None:
    buffer, one, two = torch.zeros(8), device.Stream(), device.Stream()
    write(device, one, buffer[:4], after=None)
    write(device, two, buffer[4:], after=None)
    for stream in (one, two):
        device.item_uses(stream, stream.launch(None), "read", reads=[torch.ones(2)])
    device.order.check()


def test_memory_that_is_freed_while_a_stream_uses_it_is_a_race(device: LateDevice) -> None:
    stream = device.Stream()
    buffer = device.memory.take((8,), (1,), torch.float32)
    device.is_queued = True
    device.item_uses(stream, stream.launch(None), "send", reads=[buffer])
    del buffer
    device.is_queued = False
    with pytest.raises(RaceError, match=r"send reads .* freed memory writes on stream compute"):
        device.order.check()


def test_memory_of_torch_that_is_given_out_again_has_no_past(device: LateDevice) -> None:
    one, two = device.Stream(), device.Stream()
    for stream in (one, two):
        write(device, stream, torch.zeros(1024), after=None)  # the same memory, as a rule
    device.order.check()
