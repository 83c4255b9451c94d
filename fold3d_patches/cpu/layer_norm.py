"""Patch ``megatron.core.transformer.torch_norm.WrappedTorchNorm``.

Why: without Transformer Engine and NVIDIA apex Megatron normalizes with torch's modules, and
    refuses them under ``--sequence-parallel``.
Change: with sequence parallelism the module is torch's own all the same (so its results are
    torch's, bit for bit) and its parameters carry the mark by which Megatron sums their gradients
    over the tensor-parallel ranks. Without it, upstream decides.
Remove when: ``WrappedTorchNorm`` accepts sequence parallelism.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from fold3d_patches.registry import Patch, around


def _allow_sequence_parallel(
    upstream: Callable[..., Any], cls: type, config: Any, *args: Any, **kwargs: Any
) -> Any:
    if not config.sequence_parallel:
        return upstream(cls, config, *args, **kwargs)
    plain = copy.copy(config)
    plain.sequence_parallel = False
    norm = upstream(cls, plain, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


def patches() -> Iterator[Patch]:
    """The norm that ``--transformer-impl local`` uses."""
    yield around(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        _allow_sequence_parallel,
        parameters="cls config hidden_size eps persist_layer_norm zero_centered_gamma "
        "normalization",
    )
