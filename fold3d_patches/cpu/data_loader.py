"""Patch ``build_pretraining_data_loader``.

Why: an iterator of torch's DataLoader draws a seed for its workers from torch's default
    generator. Only the first tensor-parallel rank has an iterator, and on a CPU dropout draws
    from the same generator: its ranks would drop different units and their replicas drift apart.
Change: a loader draws from a generator of its own. It does not pin memory, which would need a
    driver.
Remove when: Megatron passes a generator to its DataLoader.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from fold3d_patches.registry import around


@around(
    "megatron.training.datasets.data_samplers:build_pretraining_data_loader",
    rebinds=("megatron.training.training:build_pretraining_data_loader",),
    parameters="dataset consumed_samples /",
)
def _with_own_generator(
    upstream: Callable[[Any, int], Any], dataset: Any, consumed_samples: int
) -> Any:
    loader = upstream(dataset, consumed_samples)
    if isinstance(loader, DataLoader):
        loader.pin_memory = False
        loader.generator = torch.Generator().manual_seed(torch.initial_seed())
    return loader


PATCHES = (_with_own_generator,)
