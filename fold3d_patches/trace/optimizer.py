"""Patch ``ChainedOptimizer.prepare_grads`` and ``step_with_ready_grads``.

Why: Megatron's ``step`` alternates between updating parameters and waiting for other ranks.
Change: a trace gets the updates only; the rest of the step is waiting.
Remove when: Megatron's optimizer calls hooks around its update.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.trace.tracer import Tracer


def patches(tracer: "Tracer") -> tuple[Patch, ...]:
    """Return the patches of the two parts of a step that compute."""

    def make(upstream: Callable[..., bool]) -> Callable[..., bool]:
        def recorded(self: Any) -> bool:
            # A step of one stage is an action; that of all stages follows the program.
            with tracer.recorder.span(tracer.recorder.running or "optimizer", "optimizer"):
                return upstream(self)

        return recorded

    return tuple(
        Patch(
            target=f"megatron.core.optimizer.optimizer:ChainedOptimizer.{name}",
            parameters=("self",),
            make=make,
        )
        for name in ("prepare_grads", "step_with_ready_grads")
    )
