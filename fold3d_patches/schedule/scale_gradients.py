"""Patch ``megatron.core.distributed.DistributedDataParallel.scale_gradients``.

Why: with ``--calculate-per-token-loss``, ``finalize_model_grads`` divides all gradients by the
    number of tokens at the end of an iteration.
Change: gradients that are still being reduced are divided afterwards.
Remove when: Megatron's optimizer divides by the number of tokens when it steps.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps


def patch(due: "DueSteps") -> Patch:
    """Return the patch of the scaling of a model chunk's gradients."""

    def make(upstream: Callable[..., None]) -> Callable[..., None]:
        def scale_gradients(self: Any, scaling_factor: Any) -> None:
            if not due.defer_scaling(self, scaling_factor):
                upstream(self, scaling_factor)

        return scale_gradients

    module = "megatron.core.distributed.distributed_data_parallel"
    return Patch(
        target=f"{module}:DistributedDataParallel.scale_gradients",
        parameters=("self", "scaling_factor"),
        make=make,
    )
