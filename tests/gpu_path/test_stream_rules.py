"""Each rule of NCCL and CUDA that the device of the tests has: its fault shows, and only that."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from tests.gpu_path.happens_before import RaceError
from tests.gpu_path.late_device import Delays, HangError, LateDevice, Stream
from tests.gpu_path.late_groups import LateGroup
from tests.gpu_path.queued_operators import QueuedOperators

ONE, MANY = 1, 64


@pytest.fixture(params=[MANY])
def device(request: pytest.FixtureRequest) -> Iterator[LateDevice]:
    late = LateDevice(Delays(share=0.0), request.param, launches=64)
    with QueuedOperators(late):
        for _ in range(2):  # the first one runs at once
            torch.ones(64) * 2.0
        yield late


@pytest.fixture
def group(device: LateDevice) -> Iterator[Callable[..., LateGroup]]:
    with _disable_current_modes():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def make(**options: bool) -> LateGroup:
        return LateGroup(dist.group.WORLD, device, **options)

    yield make
    with _disable_current_modes():
        dist.destroy_process_group()


one_queue = pytest.mark.parametrize("device", [ONE], ids=["one queue"], indirect=True)


def blocked(stream: Stream) -> threading.Event:
    """Launch an item that lasts until the returned event is set."""
    ends = threading.Event()
    stream.launch(ends.wait, what="blocked")
    return ends


# Storages and streams.


@pytest.mark.parametrize("allocates", ["compute", "side"])
@pytest.mark.parametrize("records", [False, True])
def test_memory_that_another_stream_reads_is_reused_unless_it_is_recorded(
    device: LateDevice, allocates: str, records: bool
) -> None:
    side = device.Stream()
    owner, reader = (device.compute, side) if allocates == "compute" else (side, device.compute)
    with device.stream(owner):
        tensor = torch.ones(64) * 2.0
    reader.wait_stream(owner)
    goes_on = blocked(reader)
    with device.stream(reader):
        twice = tensor * 2.0
    if records:
        device.memory.record_stream(tensor, reader)
    del tensor
    with device.stream(owner):
        torch.ones(64) * 3.0
    owner.synchronize()
    goes_on.set()
    reader.synchronize()
    with _disable_current_modes():
        assert (twice == 4.0).all().item() is records
    if not records:
        with pytest.raises(RaceError, match="freed memory writes"):
            device.order.check()


# What NCCL keeps.


@pytest.mark.parametrize("keeps", [False, True])
def test_a_collective_keeps_its_tensors_if_the_group_does(
    device: LateDevice, group: Callable[..., LateGroup], keeps: bool
) -> None:
    made = group(keeps=keeps)
    tensor = torch.ones(64) * 2.0
    work = made.allreduce([tensor], dist.AllreduceOptions())
    del tensor
    work.wait()
    assert bool(device.order.races) is not keeps


class _Instant:
    """A group whose transfers are over at once."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        pass

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        tensors[0].fill_(1.0)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("transfer", ["send", "recv"])
def test_a_transfers_tensor_is_recorded_on_its_stream_if_the_group_does(
    device: LateDevice, group: Callable[..., LateGroup], transfer: str, keeps: bool
) -> None:
    made = group(keeps=keeps)
    made._group = _Instant()
    getattr(made, transfer)([torch.ones(64) * 2.0], 0)
    assert bool(device.order.races) is not keeps


def test_the_stash_is_gone_when_one_stream_has_waited_though_the_owner_has_not(
    device: LateDevice, group: Callable[..., LateGroup]
) -> None:
    made, owner = group(keeps=True), device.Stream()
    with device.stream(owner):
        work = made.allreduce([torch.ones(64) * 2.0], dist.AllreduceOptions())
    assert not device.order.races  # it is stashed
    work.wait()  # makes the compute stream wait, and lets go
    with pytest.raises(RaceError, match=r"allreduce .* freed memory writes on stream stream"):
        device.order.check()


def test_lists_go_through_memory_of_the_current_stream(
    device: LateDevice, group: Callable[..., LateGroup]
) -> None:
    made, current = group(), device.Stream()
    part, whole = torch.ones(64) * 2.0, torch.zeros(64)
    with device.stream(current):
        work = made.allgather([[whole]], [part])
    work.wait()
    with pytest.raises(RaceError, match=r"allgather .* freed memory writes on stream stream"):
        device.order.check()


def test_a_synchronous_collective_is_on_the_current_stream(
    device: LateDevice, group: Callable[..., LateGroup]
) -> None:
    made, side = group(), device.Stream()
    options = dist.AllreduceOptions()
    options.asyncOp = False
    with device.stream(side):
        tensor = torch.ones(64) * 2.0
        made.allreduce([tensor], options).wait()
        del tensor
    device.order.check()


# What holds up the one queue.


@pytest.mark.parametrize("timed", [False, True])
@one_queue
def test_an_event_with_time_stops_the_queue_until_it_has_passed(
    device: LateDevice, timed: bool
) -> None:
    side = device.Stream()
    goes_on = blocked(side)
    device.communicates(side, side.last, "allreduce")
    device.Event(enable_timing=timed).record(side)
    computation = device.compute.launch(lambda: None)
    if timed:
        time.sleep(0.1)
        assert not computation.is_over
        goes_on.set()
    computation.wait()
    goes_on.set()
    assert bool(device.stalls) is timed


# The launch limit.


def sends_behind(device: LateDevice, computations: int) -> list[bool]:
    """Compute behind a receive that ends once the send has begun that is launched last."""
    receives, sends = device.Stream(), device.Stream()
    sent: list[bool] = []
    receives.launch(lambda: [time.sleep(0.01) for _ in range(100) if not sent], what="receive")
    device.compute.wait_stream(receives)
    for _ in range(computations):
        device.compute.launch(lambda: None)
    sends.launch(lambda: sent.append(True))
    return sent


@one_queue
def test_the_host_stops_at_the_limit_and_a_send_behind_it_never_starts(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gpu_path.late_device.STANDS_S", 0.2)
    with pytest.raises(HangError, match="the host stands"):
        sends_behind(device, 200)


def test_below_the_limit_the_host_goes_on(device: LateDevice) -> None:
    sent = sends_behind(device, 20)
    device.compute.synchronize()
    assert sent


# A communicator.


@pytest.mark.parametrize("both", ["one group", "two groups"])
def test_a_group_runs_its_collectives_in_order_on_any_stream(
    device: LateDevice, group: Callable[..., LateGroup], both: str
) -> None:
    first, side, options = group(), device.Stream(), dist.AllreduceOptions()
    goes_on = blocked(side)
    with device.stream(side):
        first.allreduce([torch.ones(64) * 2.0], options)
    second = first if both == "one group" else group()
    options.asyncOp = False  # on the current stream
    work = second.allreduce([torch.ones(64) * 2.0], options)
    device.compute.last.ask_for()
    time.sleep(0.1)
    assert work.is_completed() is (both == "two groups")
    goes_on.set()
    device.synchronize()
    assert work.is_completed()


# The host.


def test_freed_memory_goes_to_the_next_of_its_size_on_its_stream(device: LateDevice) -> None:
    side = device.Stream()
    tensor = torch.empty(4096)
    address = tensor.data_ptr()
    del tensor
    with device.stream(side):
        assert torch.empty(4096).data_ptr() != address
    assert torch.empty(4096).data_ptr() == address


def test_the_pool_hands_a_stream_out_again(device: LateDevice) -> None:
    streams = [device.Stream() for _ in range(33)]
    assert streams[32] is streams[0]
    assert len({stream.number for stream in streams}) == 32
