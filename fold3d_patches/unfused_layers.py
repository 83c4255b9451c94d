"""Patch the linear layers of ``megatron.core.tensor_parallel.layers``.

Why: Megatron's default fuses the accumulation of gradients. Transformer Engine's layers do so by
    themselves, but Megatron's own, such as the output layer, need a kernel of NVIDIA's apex.
Change: without that kernel these layers accumulate unfused, and the flag holds for the others.
Remove when: Megatron's layers do without apex, or the flag is each layer's own.
"""

import copy
from collections.abc import Callable
from typing import Any

from fold3d_patches.registry import around


def _unfused(
    upstream: Callable[..., None], self: Any, *args: Any, config: Any, **kwargs: Any
) -> None:
    if config.gradient_accumulation_fusion:
        config = copy.copy(config)
        config.gradient_accumulation_fusion = False
    upstream(self, *args, config=config, **kwargs)


PATCHES = tuple(
    around(f"megatron.core.tensor_parallel.layers:{layer}.__init__")(_unfused)
    for layer in ("ColumnParallelLinear", "RowParallelLinear")
)
