"""Patch ``megatron.training.initialize.initialize_megatron``.

Why: ``pretrain`` calls it without ``allow_no_cuda``, and it then asserts that CUDA is there.
Change: the argument is True.
Remove when: ``pretrain`` passes ``allow_no_cuda`` on.
"""

from collections.abc import Callable
from typing import Any

from fold3d_patches.registry import around


@around(
    "megatron.training.initialize:initialize_megatron",
    rebinds=(
        "megatron.training:initialize_megatron",
        "megatron.training.training:initialize_megatron",
    ),
    parameters="allow_no_cuda",
)
def _without_cuda(upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return upstream(*args, **kwargs | {"allow_no_cuda": True})


PATCHES = (_without_cuda,)
