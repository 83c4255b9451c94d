"""Patch ``megatron.core.tensor_parallel.random.CheckpointWithoutOutput``.

Why: a layer keeps a module's checkpoint as an attribute, and discards the module's output when
    what follows is computed. By then the other micro-batch of a pair has set the attribute.
Change: with pairs, each micro-batch discards its own innermost output.
Remove when: Megatron keeps these checkpoints in variables of a forward.
"""

from collections.abc import Callable
from typing import Any

from fold3d_patches.registry import Patch, around
from megatron.fold3d.runtime.tensor_parallel.baton import Baton

_CLASS = "megatron.core.tensor_parallel.random:CheckpointWithoutOutput"


def patches(baton: Baton) -> tuple[Patch, Patch]:
    """Return the patches that keep the checkpoints of two micro-batches apart."""
    kept: tuple[list[Any], list[Any]] = [], []  # of each side, the innermost last

    def checkpoint(upstream: Callable[..., Any], self: Any, *args: Any) -> Any:
        kept[baton.side()].append(self)
        return upstream(self, *args)

    def discard(upstream: Callable[..., None], _: Any, hook_tensor: Any) -> None:
        upstream(kept[baton.side()].pop(), hook_tensor)

    return (
        around(f"{_CLASS}.checkpoint", checkpoint),
        around(f"{_CLASS}.discard_output_and_register_recompute", discard),
    )
