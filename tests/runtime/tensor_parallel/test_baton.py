"""Two functions in turn, with what Megatron keeps per process swapped between them."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from megatron.core import parallel_state, utils
from megatron.core.tensor_parallel import random
from megatron.core.utils import GlobalMemoryBuffer

from fold3d_patches import cpu
from fold3d_patches.registry import apply
from megatron.fold3d.runtime.tensor_parallel.baton import Baton

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _megatron_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parallel_state, "_GLOBAL_MEMORY_BUFFER", GlobalMemoryBuffer())
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", random.CudaRNGStatesTracker())
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    with apply(cpu.patches()):
        random.get_cuda_rng_tracker().add("model-parallel-rng", 1)
        yield


@pytest.fixture
def baton() -> Iterator[Baton]:
    baton = Baton()
    yield baton
    baton.close()


def steps(baton: Baton, name: str, count: int, seen: list[str]) -> Callable[[], None]:
    def run() -> None:
        for step in range(count):
            seen.append(f"{name}{step}")
            baton.hand_over()
        seen.append(f"{name} ends")

    return run


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((2, 2), "a0 b0 a1 b1 a ends b ends"),
        ((1, 2), "a0 b0 a ends b1 b ends"),
        ((2, 0), "a0 b ends a1 a ends"),
    ],
)
def test_the_first_is_always_ahead_and_whoever_is_left_goes_on(
    baton: Baton, counts: tuple[int, int], expected: str
):
    for _ in range(2):  # the thread stays for the next pair
        seen: list[str] = []
        baton.run(steps(baton, "a", counts[0], seen), steps(baton, "b", counts[1], seen), CPU)
        assert " ".join(seen) == expected


def test_outside_of_a_pair_nothing_is_handed_over(baton: Baton):
    baton.hand_over()


def fail(baton: Baton, after: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(after):
            baton.hand_over()
        raise RuntimeError("connection closed by peer")

    return run


def go_on(baton: Baton, seen: list[str]) -> Callable[[], None]:
    def run() -> None:
        try:
            for _ in range(5):
                baton.hand_over()
            seen.append("ran to its end")
        finally:
            seen.append("ended")

    return run


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("fails_first", [True, False])
def test_when_one_fails_the_other_ends_and_the_error_is_raised(
    baton: Baton, after: int, fails_first: bool
):
    seen: list[str] = []
    failing, other = fail(baton, after), go_on(baton, seen)
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        baton.run(*((failing, other) if fails_first else (other, failing)), CPU)
    assert "ran to its end" not in seen
    assert seen == ([] if fails_first and not after else ["ended"])
    baton.run(lambda: None, lambda: None, CPU)  # and the baton still works


def test_each_finds_what_it_left(baton: Baton):
    """Forks of a random state overlap in time, as those of two transformer blocks do."""
    tracker = random.get_cuda_rng_tracker()
    before = torch.get_rng_state()
    kept = tracker.get_states()["model-parallel-rng"].clone()
    buffers = set()

    def fork() -> None:
        buffers.add(id(parallel_state.get_global_memory_buffer()))
        with tracker.fork():
            random._set_checkpointing()
            baton.hand_over()
            assert random.is_checkpointing()
            assert tracker._current_state_name == "model-parallel-rng"
            random._unset_checkpointing()
            baton.hand_over()
        assert not random.is_checkpointing()
        baton.hand_over()

    baton.run(fork, fork, CPU)
    assert len(buffers) == 2
    assert tracker._current_state_name == "default-rng"
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], kept)


def test_a_backward_runs_on_the_thread_that_starts_it(baton: Baton):
    threads: dict[str, set[int]] = {"a": set(), "b": set()}

    class Switch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor, name: str) -> torch.Tensor:
            ctx.name = name
            return x.view_as(x)

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            baton.hand_over()
            threads[ctx.name].add(threading.get_ident())
            return grad, None

    def backward(name: str) -> Callable[[], None]:
        x = torch.ones(2, requires_grad=True)
        loss = Switch.apply(Switch.apply(x, name), name).sum()
        return lambda: loss.backward()

    baton.run(backward("a"), backward("b"), CPU)
    assert threads["a"] == {threading.get_ident()}
    assert len(threads["b"]) == 1
    assert threads["a"] != threads["b"]


def test_each_has_the_profilers_ranges_that_it_has_opened(
    baton: Baton, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(utils, "_nvtx_enabled", True)
    monkeypatch.setattr(utils, "_nvtx_range_messages", [])

    def ranges(*names: str) -> Callable[[], None]:
        def run() -> None:
            for name in names:
                utils.nvtx_range_push(name)
                baton.hand_over()
                utils.nvtx_range_pop(name)

        return run

    utils.nvtx_range_push("pair")
    baton.run(ranges("attention", "mlp"), ranges("mlp", "attention"), CPU)
    utils.nvtx_range_pop("pair")
