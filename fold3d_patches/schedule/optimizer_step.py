"""Patch ``megatron.core.optimizer.optimizer.ChainedOptimizer.step``.

Why: ``train_step`` steps all parameters at the end of an iteration; a model chunk whose gradients
    are still on their way can only be stepped later.
Change: chunks whose DP.sync reaches into the next iteration are stepped before their next forward,
    with the learning rate and weight decay of this one (paper Algorithm 2). The norm of the
    gradients is unknown yet: it is logged when it is known, with its iteration. A step that may
    have to be clipped or skipped stays Megatron's own.
Remove when: Megatron's optimizer steps model chunks one by one.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.deferred_sync import DeferredSync


def patch(deferred: "DeferredSync") -> Patch:
    """The step at the end of an iteration."""

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        from megatron.training import get_args

        def step(self: Any) -> Any:
            iteration = get_args().curr_iteration + 1
            return deferred.step(self, iteration, whole_step=lambda: upstream(self))

        return step

    return Patch(
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.step",
        parameters=("self",),
        make=make,
    )
