"""Offloading on a real GPU: what CPUs cannot show. `make build-cuda` comes first."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.fold3d.plan.ir import Op
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.passes.offload import add_offload
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.runtime.device import synchronize
from megatron.fold3d.runtime.offload.copies import Copies
from megatron.fold3d.runtime.offload.host_memory import available_bytes
from megatron.fold3d.runtime.offload.offload_library import batched_copy, pinned_memory
from megatron.fold3d.runtime.offload.offloader import Offloader
from tests.configs import CONFIG

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
HIDDEN = 1024
SIZES = (1, 17, 512, 4097, 1 << 20, (8 << 20) + 3)
GIB = 1 << 30
ENDLESS = """
import torch
from megatron.fold3d.runtime.offload.copies import Copies
from megatron.fold3d.runtime.offload.host_memory import take

device = torch.device("cuda")
host, copies = take(4 << 30, device), Copies(device)
there = torch.empty(4 << 30, dtype=torch.uint8, device=device)
for number in range(10000):
    copied = copies.to_host([host], [there])
    if number == 10:
        print("copying", flush=True)
copied.synchronize()
"""
Copy = Callable[[Sequence[Tensor], Sequence[Tensor], int], None]


def flat(memory: Tensor) -> list[Tensor]:
    """Cut memory into tensors of odd sizes, at aligned and at odd addresses."""
    return list(memory[: sum(SIZES)].split(SIZES))


@pytest.mark.parametrize(
    "copy", [batched_copy, lambda *a: batched_copy(*a, 8)], ids=["batched", "kernel"]
)
def test_bytes_arrive_as_they_were_in_both_directions(copy: Copy):
    memory = pinned_memory(2 * sum(SIZES), None)
    there, back = memory.split(sum(SIZES))
    sources = flat(torch.randint(256, (sum(SIZES),), dtype=torch.uint8, device=CUDA))
    returned = flat(torch.zeros(sum(SIZES), dtype=torch.uint8, device=CUDA))
    back.fill_(7)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    copy(flat(there), sources, stream.cuda_stream)
    copy(returned, flat(there), stream.cuda_stream)
    stream.synchronize()
    for source, on_host, target in zip(sources, flat(there), returned, strict=True):
        assert torch.equal(source.cpu(), on_host)
        assert torch.equal(source, target)
    assert bool((back == 7).all())


def test_copies_begin_after_compute_and_compute_goes_on_after_them():
    copies = Copies(CUDA)
    memory = pinned_memory(64 << 20, None)
    for value in range(20):
        tensor = torch.zeros(64 << 20, dtype=torch.uint8, device=CUDA)
        torch.cuda._sleep(10_000_000)  # a copy that does not wait finds zeros
        tensor.fill_(value)
        copied = copies.to_host([memory], [tensor])
        copies.wait(copied)
        tensor.fill_(255)  # what has been waited for may be overwritten
        synchronize(CUDA)
        assert bool((memory == value).all())


@pytest.mark.processes
def test_a_process_that_is_killed_in_mid_copy_gives_its_locked_memory_back():
    before = available_bytes()
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS], cwd=root, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "copying\n"
        assert available_bytes() < before - 3 * GIB
        process.kill()
    deadline = time.monotonic() + 30
    while available_bytes() < before - GIB:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("depth", [1, 3])
def test_gradients_and_peaks_are_those_of_an_iteration_without(depth: int):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, HIDDEN)]
    model = torch.nn.Sequential(*layers).to(CUDA)
    plan = build("afab", num_ranks=1, num_segments=1, num_microbatches=12)
    offloaded = add_offload(plan, depth=depth)
    # What is above 1/16 of a hidden state: the input, what goes into GELU and what comes out.
    saved_bytes = 3 * 512 * HIDDEN * 4
    config = replace(CONFIG, device="cuda", offload_everything=True, saved_bytes=saved_bytes)
    offloader = Offloader(replace(config, offload_activations="on"))
    offloader.depth = depth
    theirs = _gradients(plan.programs[0], model, None)
    for _ in range(3):
        ours = _gradients(offloaded.programs[0], model, offloader)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert (offloader.peak,) == peak_activations(offloaded, depth=depth)
    synchronize(CUDA)
    assert offloader.num_reloads == 3 * 12
    assert offloader.pool.num_bytes == offloader.pool.high_water_bytes


def _gradients(program: Any, model: torch.nn.Module, offloader: Offloader | None) -> list[Tensor]:
    model.zero_grad()
    losses: dict[int | None, Tensor] = {}
    if offloader is not None:
        sizes = {"chunks": [model], "hidden_bytes": 512 * HIDDEN * 4}
        iteration: Any = SimpleNamespace(trains=True, program=program, **sizes)
        offloader.prepare(iteration)
    for action in program:
        if action.op is Op.FORWARD:
            torch.manual_seed(action.microbatch)
            tensor = torch.randn(512, HIDDEN, device=CUDA)
            if offloader is None:
                losses[action.microbatch] = model(tensor).sum()
            else:
                with offloader.saving(action):
                    losses[action.microbatch] = model(tensor).sum()
        elif action.op is Op.BACKWARD:
            if offloader is None:
                losses.pop(action.microbatch).backward()
            else:
                with offloader.using(action):
                    losses.pop(action.microbatch).backward()
        elif offloader is not None and action.op is Op.OFFLOAD:
            offloader.offload(action, None)
        elif offloader is not None:
            offloader.reload(action)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
