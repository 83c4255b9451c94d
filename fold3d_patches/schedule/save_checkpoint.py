"""Patch ``megatron.training.checkpointing.save_checkpoint``.

Why: at the end of an iteration some optimizer steps may still be due.
Change: these steps are taken before parameters and optimizer are written.
Remove when: Megatron calls a hook before it reads parameters.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps


def patch(due: "DueSteps") -> Patch:
    """Return the patch of the only function that writes checkpoints."""

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            due.drain()
            return upstream(*args, **kwargs)

        return save_checkpoint

    return Patch(
        target="megatron.training.checkpointing:save_checkpoint",
        rebinds=("megatron.training.training:save_checkpoint",),
        make=make,
    )
