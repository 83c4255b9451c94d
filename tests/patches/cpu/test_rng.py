"""Dropout draws from the CPU's generator, so that is what Megatron must fork and restore."""

import logging
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random
from torch.nn.functional import dropout

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def tracker() -> Any:
    torch.manual_seed(1)
    random.initialize_rng_tracker(force_reset=True)
    tracker = random.get_cuda_rng_tracker()
    tracker.add("model-parallel-rng", 2)
    tracker.add("expert-parallel-rng", 3)
    return tracker


def drawn(seed: int, count: int) -> list[float]:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_fork_draws_from_its_own_state_and_goes_on_where_it_stopped(tracker: Any) -> None:
    forked, plain = [], []
    for _ in range(3):
        with tracker.fork():
            forked.append(torch.rand(1).item())
        plain.append(torch.rand(1).item())
    assert (forked, plain) == (drawn(2, 3), drawn(1, 3))


def test_forks_nest(tracker: Any) -> None:
    with tracker.fork():
        first = torch.rand(1).item()
        with tracker.fork("expert-parallel-rng"):
            inner = torch.rand(1).item()
        second = torch.rand(1).item()
    assert [first, second] == drawn(2, 2)
    assert [inner, torch.rand(1).item()] == [*drawn(3, 1), *drawn(1, 1)]


def test_a_fork_of_the_forked_state_goes_on_with_it(tracker: Any) -> None:
    values = []
    with tracker.fork():
        values.append(torch.rand(1).item())
        with tracker.fork():
            values.append(torch.rand(1).item())
        values.append(torch.rand(1).item())
    assert values == drawn(2, 3)


def test_a_fork_that_fails_restores_the_state_outside(tracker: Any) -> None:
    def fail() -> None:
        with tracker.fork():
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.rand(1).item() == drawn(1, 1)[0]


def test_an_unknown_fork_is_refused(tracker: Any) -> None:
    with pytest.raises(KeyError, match="no rng state 'x'"), tracker.fork("x"):
        pass


def test_a_fork_does_not_warn(tracker: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), tracker.fork():
        torch.rand(1)
    assert caplog.records == []


def test_torch_cuda_has_the_state_and_the_seed_of_the_default_generator() -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    value = torch.rand(1)
    torch.cuda.set_rng_state(state)
    assert torch.rand(1) == value
    assert value.item() == drawn(7, 1)[0]


@pytest.mark.parametrize("forks", [False, True], ids=["plain dropout", "forked dropout"])
def test_recomputation_drops_what_the_forward_pass_dropped(tracker: Any, forks: bool) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        if forks:
            with tracker.fork():
                return dropout(x, 0.5) * x
        return dropout(x, 0.5) * x

    def gradients(recompute: bool) -> list[torch.Tensor]:
        random.initialize_rng_tracker(force_reset=True)
        torch.manual_seed(1)
        tracker.set_states({"model-parallel-rng": torch.Generator().manual_seed(2).get_state()})
        random._CUDA_RNG_STATE_TRACKER = tracker
        inputs = [torch.arange(64.0, requires_grad=True) for _ in range(2)]
        outputs = [random.checkpoint(layer, False, x) if recompute else layer(x) for x in inputs]
        for output in reversed(outputs):
            output.sum().backward()
        return [x.grad for x in inputs if x.grad is not None]

    without, with_recompute = gradients(False), gradients(True)
    assert torch.equal(torch.stack(without), torch.stack(with_recompute))
    assert not torch.equal(without[0], without[1])
