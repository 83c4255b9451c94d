"""Patch ``megatron.core.transformer.moe.moe_utils.maybe_move_tensor_to_cpu``.

Why: before an all-to-all Megatron moves the numbers of tokens to the host, and makes them what
    torch takes as split sizes on the way. A tensor that is on the host already stays a tensor,
    which torch refuses.
Change: it becomes an array as well.
Remove when: ``as_numpy`` does not depend on where the tensor was.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fold3d_patches.registry import Patch, around


def _always_as_asked(
    upstream: Callable[..., Any], tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    moved = upstream(tensor, as_numpy, record_stream)
    return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved


def patches() -> Iterator[Patch]:
    """The numbers of tokens that expert-parallel ranks exchange."""
    name = "maybe_move_tensor_to_cpu"
    yield around(
        f"megatron.core.transformer.moe.moe_utils:{name}",
        _always_as_asked,
        rebinds=(f"megatron.core.transformer.moe.token_dispatcher:{name}",),
        parameters="tensor as_numpy record_stream",
    )
