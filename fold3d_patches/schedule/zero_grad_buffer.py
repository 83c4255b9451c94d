"""Patch ``megatron.core.distributed.DistributedDataParallel.zero_grad_buffer``.

Why: ``train_step`` zeroes all gradients before the first forward of an iteration.
Change: gradients whose step is still due are zeroed right after that step.
Remove when: ``train_step`` leaves it to the schedule when gradients are zeroed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps


def patch(due: "DueSteps") -> Patch:
    """Return the patch of the zeroing of a model chunk's gradients."""

    def make(upstream: Callable[..., None]) -> Callable[..., None]:
        def zero_grad_buffer(self: Any) -> None:
            if not due.defer_zeroing(self):
                upstream(self)

        return zero_grad_buffer

    module = "megatron.core.distributed.distributed_data_parallel"
    return Patch(
        target=f"{module}:DistributedDataParallel.zero_grad_buffer",
        parameters=("self",),
        make=make,
    )
