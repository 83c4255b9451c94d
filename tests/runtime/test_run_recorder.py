"""What the recorder finds on one rank, on a device that counts its memory as the test says."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.ops import COMPUTE_OPS
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.runtime import device
from megatron.fold3d.runtime.measure import run_recorder, saved_bytes
from megatron.fold3d.runtime.measure.run_recorder import RunRecorder

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("free", "reserved", "pieces", "peak", "expected"),
    [
        (100, 50, 0, 50, 100),
        (100, 50, 0, 30, 120),  # whole segments that the peak leaves over are given back
        (100, 50, 20, 30, 100),  # pieces of segments in use are not
        (100, 50, 40, 30, 100),  # the peak lay in some of them
    ],
)
def test_reserved_memory_is_free_only_where_the_allocator_gives_it_back(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, pieces: int, peak: int, expected: int
):
    stats = {"inactive_split_bytes.all.current": pieces}
    for name, value in {
        "mem_get_info": (free, 1000),
        "memory_stats": stats,
        "memory_reserved": reserved,
        "max_memory_allocated": peak,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert device.free_device_bytes(torch.device("cuda")) == expected


def test_nine_tenths_of_free_memory_may_be_planned_with(monkeypatch: pytest.MonkeyPatch):
    held = 0
    group = SimpleNamespace(size=lambda: 1)
    for module in (run_recorder, saved_bytes):
        monkeypatch.setattr(module, "held_device_bytes", lambda _: held)
    monkeypatch.setattr(run_recorder, "free_device_bytes", lambda _: 1000)
    monkeypatch.setattr(run_recorder, "gathered", lambda mine: [mine])
    monkeypatch.setattr(run_recorder.dist, "get_backend", lambda _: "gloo")
    chunk: Any = torch.nn.Linear(4, 4, bias=False)
    chunk.weight.main_grad = torch.zeros(4, 4)
    iteration: Any = SimpleNamespace(
        rank=0,
        plan=build("afab", num_ranks=1, num_segments=1, num_microbatches=3),
        chunks=[chunk],
        groups=SimpleNamespace(dp_cp=group, tp=group),
        pp_group=group,
        hidden_bytes=8,
        device=CPU,
    )

    def run(action: Action) -> None:
        nonlocal held
        held += {Op.FORWARD: 70, Op.BACKWARD: -70}.get(action.op, 0)

    recorder = RunRecorder(CPU)
    handlers = recorder.handlers(iteration, dict.fromkeys(COMPUTE_OPS, run))
    for action in iteration.plan.programs[0]:
        handlers[action.op](action)
    recorder.step_s = 2.0
    times = recorder.agreed(iteration)
    assert times.held is not None
    assert (times.held.saved, times.held.delayed) == ((70.0,), (0.0,))
    assert times.held.most == (3 * 70 + 900.0,)
    assert times.room_bytes == 900.0
    assert times.optimizer_s == (2.0,)
    assert min(times.forward_s + times.backward_s) > 0
    assert not any(line.s_per_byte for line in times.lanes.values())
