"""Patch ``megatron.core.optimizer.optimizer.ChainedOptimizer.step``.

Why: with the distributed optimizer each replica steps its own shards alone.
Change: of some segments each replica steps all shards, so that nothing has to be gathered.
Remove when: Megatron lets each model chunk choose whether its optimizer is sharded.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.replicated_steps import ReplicatedSteps


def patch(replicated: "ReplicatedSteps") -> Patch:
    """Return the patch of the optimizer step at the end of an iteration."""

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any) -> Any:
            with replicated.widened(self):
                return upstream(self)

        return step

    return Patch(
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.step",
        parameters=("self",),
        make=make,
    )
