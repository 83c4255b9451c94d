"""Patch the GPU's random generator: it becomes the CPU's.

Why: dropout on a GPU draws from ``torch.cuda``'s generator, whose state Megatron saves, forks per
    tensor-parallel rank and restores around recomputation. On the CPU dropout draws from torch's
    default generator, so that is the state to save, fork and restore.
Change: ``torch.cuda``'s state is the default generator's state; a fork no longer warns that the
    CPU's state moved inside it, because here it must.
Remove when: Megatron's tracker asks the device module for its generator.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fold3d_patches.registry import Patch

_RANDOM = "megatron.core.tensor_parallel.random"


def _get_rng_state(_upstream: Any) -> Callable[..., torch.Tensor]:
    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    return get_rng_state


def _set_rng_state(_upstream: Any) -> Callable[..., None]:
    def set_rng_state(new_state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(new_state)

    return set_rng_state


def _manual_seed(_upstream: Any) -> Callable[[int], None]:
    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    return manual_seed


def _fork(_upstream: Any) -> Callable[..., Any]:
    @contextmanager
    def fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"no rng state {name!r}; the tracker has {sorted(self.states_)}")
        outer_name, outer_state = self._current_state_name, torch.get_rng_state()
        if outer_name in self.states_:
            self.states_[outer_name] = outer_state
        self._current_state_name = name
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            # A fork of the state that is forked already has moved it on.
            torch.set_rng_state(self.states_.get(outer_name, outer_state))
            self._current_state_name = outer_name

    return fork


def patches() -> tuple[Patch, ...]:
    """The generator's state, its seed, and the tracker that forks it."""
    return (
        Patch(
            target="torch.cuda.random:get_rng_state",
            rebinds=("torch.cuda:get_rng_state",),
            parameters=("device",),
            make=_get_rng_state,
        ),
        Patch(
            target="torch.cuda.random:set_rng_state",
            rebinds=("torch.cuda:set_rng_state",),
            parameters=("new_state", "device"),
            make=_set_rng_state,
        ),
        Patch(
            target="torch.cuda.random:manual_seed",
            rebinds=("torch.cuda:manual_seed",),
            parameters=("seed",),
            make=_manual_seed,
        ),
        Patch(
            target=f"{_RANDOM}:_set_cuda_rng_state",
            parameters=("new_state", "device", "graph_safe"),
            make=_set_rng_state,
        ),
        Patch(
            target=f"{_RANDOM}:CudaRNGStatesTracker.fork",
            parameters=("self", "name"),
            make=_fork,
        ),
    )
