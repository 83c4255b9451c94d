"""Saved tensors leave and come back as they were, on time, through slots that are reused."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fold3d_patches import cpu
from fold3d_patches.registry import apply
from fold3d_patches.schedule import checkpoint
from megatron.fold3d.plan.ir import Action, Op, Plan, Program
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.passes.offload import add_offload
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.policy.offload_choice import offloaded
from megatron.fold3d.runtime.offload import host_memory
from megatron.fold3d.runtime.offload.copies import Copies, Watch
from megatron.fold3d.runtime.offload.host_memory import HostMemoryError
from megatron.fold3d.runtime.offload.offloader import Offloader
from megatron.fold3d.runtime.offload.pinned_pool import PinnedPool
from megatron.fold3d.runtime.offload.saved_tensors import SavedTensors
from tests.configs import CONFIG

CPU = torch.device("cpu")
MODEST = replace(CONFIG, offload_activations="on")
EVERYTHING = replace(MODEST, offload_everything=True)
ROOMY = replace(EVERYTHING, activation_memory_bytes=1 << 20)
HIDDEN = 64
Layer = Callable[[Tensor], Tensor]


class LateCopies(Copies):
    """Copies that are made at the last moment: when compute waits for them."""

    def __init__(self) -> None:
        super().__init__(CPU, batch=4)

    def _copy(
        self,
        stream: Any,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        watch: Watch,
        ready: Any = None,
    ) -> Any:
        copied = [list(targets), list(sources), watch]
        for target in targets:
            target.fill_(255)  # whoever reads it before finds not a number
        return copied

    def wait(self, copied: Any) -> None:
        if copied:
            super()._copy(self._streams[0], *copied)
            copied.clear()


def mlp() -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, HIDDEN)]
    return torch.nn.Sequential(*layers, torch.nn.Dropout(0.0), torch.nn.GELU())


def prepare(offloader: Offloader, program: Program, model: torch.nn.Module) -> None:
    iteration: Any = SimpleNamespace(
        trains=True, program=program, chunks=[model], hidden_bytes=8 * HIDDEN * 4
    )
    offloader.prepare(iteration)


def run(
    program: Sequence[Action], model: torch.nn.Module, layer: Layer, offloader: Offloader | None
) -> list[Tensor]:
    """Run a program of one stage; returns the gradients of the inputs and of the parameters."""
    model.zero_grad()
    saved: dict[int | None, tuple[Tensor, Tensor]] = {}
    gradients = []
    if offloader is not None:
        prepare(offloader, tuple(program), model)
    for action in program:
        microbatch = action.microbatch
        assert microbatch is not None
        if action.op is Op.FORWARD:
            torch.manual_seed(microbatch)
            tensor = torch.randn(8, HIDDEN).requires_grad_()
            with offloader.saving(action) if offloader else nullcontext():
                output = layer(tensor)
            saved[microbatch] = tensor, output.sum()
        elif action.op is Op.BACKWARD:
            tensor, loss = saved.pop(microbatch)
            with offloader.using(action) if offloader else nullcontext():
                loss.backward()
            assert tensor.grad is not None
            gradients.append(tensor.grad)
        elif offloader is not None and action.op is Op.OFFLOAD:
            offloader.offload(action, saved[microbatch][0])
        elif offloader is not None:
            offloader.reload(action)
    return [*gradients, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check_equal(
    program: Sequence[Action], model: torch.nn.Module, layer: Layer, offloader: Offloader
) -> None:
    """Check that gradients are those without offloading, bit for bit."""
    ours, theirs = (run(program, model, layer, which) for which in (offloader, None))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def queue(m: int, **options: Any) -> Plan:
    words = [f"0F{i}" for i in range(m)] + [f"0B{i}" for i in range(m)]
    return add_offload(Plan.from_text(" ".join(words)), **options)


def recomputed(model: torch.nn.Module) -> Layer:
    from megatron.core import tensor_parallel

    return lambda x: tensor_parallel.checkpoint(lambda y: model(y), False, x * 2)


@pytest.mark.parametrize("copies", [Copies, lambda _: LateCopies()], ids=["prompt", "late"])
@pytest.mark.parametrize("options", [{}, {"depth": 2}, {"at_most": 3}], ids=str)
def test_gradients_are_the_same_bits(copies: Callable[..., Copies], options: dict[str, Any]):
    model, plan = mlp(), queue(8, **options)
    offloader = Offloader(EVERYTHING, copies=copies(CPU))
    offloader.depth = options.get("depth", 1)

    for number in range(3):
        check_equal(plan.programs[0], model, model, offloader)
        assert offloader.held == 0
        if number == 0:  # nothing has said yet what it takes, so all of it stays
            assert (offloader.peak, offloader.pool.num_growths) == (8, 0)
            continue
        assert (offloader.peak,) == peak_activations(plan, depth=offloader.depth)
    assert offloader.pool.num_growths == 1
    assert offloader.pool.num_bytes == offloader.pool.high_water_bytes


def test_what_recomputation_starts_from_is_all_that_auto_moves():
    model, plan = mlp(), queue(6)
    offloader = Offloader(replace(MODEST, saved_bytes=8 * HIDDEN * 4))
    with apply([*cpu.patches(), checkpoint.patch(offloader)]):
        layer = recomputed(model)
        for _ in range(2):
            check_equal(plan.programs[0], model, layer, offloader)
            assert offloader.pool.high_water_bytes == 6 * 8 * HIDDEN * 4  # one input each
    assert (offloader.pool.num_bytes, offloader.pool.num_growths) == (6 * 8 * HIDDEN * 4, 1)


def test_too_little_memory_keeps_the_rest_of_the_first_iteration_on_the_device(
    caplog: pytest.LogCaptureFixture,
):
    model, plan, size = torch.nn.LayerNorm(HIDDEN), queue(6), 8 * HIDDEN * 4
    offloader = Offloader(replace(EVERYTHING, saved_bytes=size, activation_memory_bytes=2 * size))
    moved = []
    with caplog.at_level("INFO"):
        for _ in range(2):
            before = offloader.num_reloads
            check_equal(plan.programs[0], model, model, offloader)
            moved.append(offloader.num_reloads - before)
    assert moved == [2, 6]
    assert f"have {6 * size:,} bytes of host memory from now on, {2 * size:,} until" in caplog.text
    assert f"--activation-memory-bytes {6 * size} gives all of it" in caplog.text


def test_a_storage_leaves_once_however_many_views_are_saved():
    model, plan = torch.nn.Identity(), queue(4)

    def layer(x: Tensor) -> Tensor:
        halves = (x * 2).view(-1)
        return halves[: 4 * HIDDEN].sin() * halves[4 * HIDDEN :].cos()

    offloader = Offloader(ROOMY, copies=LateCopies())
    check_equal(plan.programs[0], model, layer, offloader)
    largest = 8 * HIDDEN * 4  # `halves` as a whole; its sine and cosine are half as large
    assert offloader.pool.high_water_bytes == 4 * 2 * largest


def test_an_emptied_storage_and_the_next_at_its_address_are_two():
    # What Megatron computes again by itself it empties in mid-forward.
    x = torch.rand(1 << 16, requires_grad=True)
    doubled, tripled = x * 2, x * 3
    saved = SavedTensors(CPU, 1, frozenset())
    with saved.hooks():
        emptied = doubled.exp()
        address = emptied.data_ptr()
        emptied.untyped_storage().resize_(0)
        later = tripled.clone()
        saved._parts[later.data_ptr()] = saved._parts.pop(address)  # as an allocator might
        later.exp_()
    sources, num_bytes = saved.flat()
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    for source, place in zip(sources, saved.places(buffer), strict=True):
        place.copy_(source)
    saved.leave()
    saved.restore(buffer)
    (gradient,) = torch.autograd.grad(later.sum(), tripled)
    assert torch.equal(gradient, later)


def test_auto_leaves_on_the_device_what_finds_no_room_on_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    size, allocate = 8 * HIDDEN * 4, PinnedPool._allocate
    available, taken = [3 * size * 10 // 9 + 1], []

    def counted(self: PinnedPool, num_bytes: int) -> Tensor:
        memory = allocate(self, num_bytes)
        taken.append(num_bytes)
        available[0] -= num_bytes
        return memory

    monkeypatch.setattr(PinnedPool, "_allocate", counted)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: available[0])
    model, plan = mlp(), build("afab", num_ranks=1, num_segments=1, num_microbatches=8)
    offloader = Offloader(replace(CONFIG, offload_activations="auto"))
    with apply([*cpu.patches(), checkpoint.patch(offloader)]):
        layer = recomputed(model)
        for moved in (0, 3):  # nothing has said before the first what it takes
            program = offloaded(plan.programs[0], offloader.choice(plan.programs[0]))
            before = offloader.num_reloads
            check_equal(program, model, layer, offloader)
            assert (offloader.num_reloads - before, offloader.held) == (moved, 0)
    assert f"8 activations of {size:,} bytes should leave, the host has memory for 3" in caplog.text
    assert taken == [3 * size]
    assert (offloader.peak,) == peak_activations(Plan((program,)))

    offloader = Offloader(replace(MODEST, saved_bytes=size))  # `on` moves all, or ends
    with (
        apply([*cpu.patches(), checkpoint.patch(offloader)]),
        pytest.raises(HostMemoryError, match=f"{8 * size:,} bytes of host memory"),
    ):
        run(queue(8).programs[0], model, recomputed(model), offloader)


def test_the_device_forgets_what_has_left():
    offloader = Offloader(ROOMY)
    plan = Plan.from_text("0F0 0OFFLOAD0 0F1 0RELOAD0 0B1 0B0").programs[0]
    model = mlp()
    prepare(offloader, plan, model)
    x = torch.randn(8, HIDDEN, requires_grad=True)
    with offloader.saving(plan[0]):
        y = model(x).sum()
    offloader.offload(plan[1], x)
    assert x.untyped_storage().nbytes() == 8 * HIDDEN * 4
    with offloader.saving(plan[2]):
        z = model(torch.randn(8, HIDDEN)).sum()
    assert x.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="RELOAD comes first"):
        y.backward()
    del z
