"""Patch ``megatron.core.optimizer.optimizer.ChainedOptimizer.step``.

Why: with the distributed optimizer each replica steps only its own shards.
Change: each replica steps all shards of some segments, so that they need no all-gather.
Remove when: Megatron lets each model chunk choose whether its optimizer is sharded.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.other_shards import ReplicatedSegments


def patch(replicated: "ReplicatedSegments") -> Patch:
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
