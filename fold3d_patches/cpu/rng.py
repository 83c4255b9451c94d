"""Patch the GPU's random generator: it becomes the CPU's.

Why: dropout on a GPU draws from ``torch.cuda``'s generator, whose state Megatron saves, forks per
    tensor-parallel rank and restores around recomputation. On the CPU dropout draws from torch's
    default generator, so that is the state to save, fork and restore.
Change: ``torch.cuda``'s state is the default generator's state; a fork no longer warns that the
    CPU's state moved inside it, because here it must.
Remove when: Megatron's tracker asks the device module for its generator.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fold3d_patches.registry import replace

_RANDOM = "megatron.core.tensor_parallel.random"


def _set_state(new_state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(new_state)


@contextmanager
def _fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Draw from a named state inside the block."""
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


PATCHES = (
    *(
        replace(
            f"torch.cuda.random:{name}", ours, rebinds=(f"torch.cuda:{name}",), parameters=takes
        )
        for name, ours, takes in (
            ("get_rng_state", lambda device=None: torch.get_rng_state(), ""),
            ("set_rng_state", _set_state, "new_state /"),
            ("manual_seed", torch.default_generator.manual_seed, "seed /"),
        )
    ),
    replace(f"{_RANDOM}:_set_cuda_rng_state", _set_state, parameters="new_state /"),
    replace(f"{_RANDOM}:CudaRNGStatesTracker.fork", _fork, parameters="self name /"),
)
