"""The device of the tests does what a GPU does, and shows what a GPU may show."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from megatron.fold3d.runtime import device as fold3d_device
from megatron.fold3d.runtime.offload import copies
from megatron.fold3d.runtime.offload.copies import Copies
from tests.gpu_path.late_device import Delays, LateDevice
from tests.gpu_path.queued_operators import QueuedOperators

CPU = torch.device("cpu")
LATE = Delays(share=1.0, longest_s=0.01)


@pytest.fixture(params=[1, 64], ids=["one queue", "many queues"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    late = LateDevice(LATE, request.param)
    monkeypatch.setitem(fold3d_device.STREAMS, "cpu", late)
    monkeypatch.setattr(copies, "batched_copy", late.copy)
    with QueuedOperators(late):
        yield late


def test_operators_run_behind_the_host_and_give_the_same(device: LateDevice) -> None:
    def grads(rounds: int) -> list[list[float]]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(32, 32)
        for _ in range(rounds):
            out = torch.nn.functional.gelu(layer(torch.ones(8, 32)))
            out.pow(2).sum().backward()
        device.compute.synchronize()
        return [parameter.grad.tolist() for parameter in layer.parameters()]

    queued = grads(4)
    device.is_queued = False
    with torch.utils._python_dispatch._disable_current_modes():
        at_once = grads(4)
    device.is_queued = True
    assert queued == at_once


def test_a_copy_that_is_waited_for_has_what_was_computed_before_it(device: LateDevice) -> None:
    engine = Copies(CPU)
    host = torch.zeros(64)
    for number in range(3):
        source = torch.ones(64) * number
        copied = engine.to_host([host], [source])
        engine.wait(copied)
        del source
        torch.ones(64)  # may reuse its memory
        copied.synchronize()
        assert host.tolist() == [float(number)] * 64


@pytest.mark.parametrize("device", [64], ids=["many queues"], indirect=True)
def test_memory_that_is_freed_before_its_copy_shows(device: LateDevice) -> None:
    engine = Copies(CPU)
    host = torch.zeros(64)
    for _ in range(2):  # the first one runs at once
        source = torch.ones(64) * 2.0
    compute_is_done = threading.Event()
    engine._streams[0].launch(compute_is_done.wait)
    copied = engine.to_host([host], [source])
    with torch.utils._python_dispatch._disable_current_modes():
        del source
        device.compute.synchronize()  # nothing has waited for the copy
    compute_is_done.set()
    copied.synchronize()
    assert host.isnan().all()


def test_clocks_measure_the_device_and_not_the_host(device: LateDevice) -> None:
    begin = fold3d_device.mark_now(CPU)
    assert begin.passed_s is not None
    device.current_stream().launch(lambda: time.sleep(0.05))
    end = fold3d_device.mark_now(CPU)
    assert end.passed_s is None
    device.current_stream().synchronize()
    assert end.passed_s is not None
    assert end.after_s(begin) >= 0.05
