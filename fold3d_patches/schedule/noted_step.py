"""Patch ``megatron.core.optimizer.optimizer.ChainedOptimizer.step``.

Why: ``--schedule auto`` compares the times of iterations that end with an optimizer step, but
    Megatron may skip a step, or run an iteration again before it.
Change: begin and end of each step are noted, and whether it was taken. If another patch replaces
    the step, this one wraps it.
Remove when: Megatron calls a hook after the optimizer step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.auto_schedule import AutoSchedule


def patch(auto: "AutoSchedule", inner: Patch | None = None) -> Patch:
    """Return the patch of the optimizer step at the end of an iteration.

    Args:
        auto: the feature that notes each step.
        inner: another patch of the same function, which this one wraps.
    """

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        take = upstream if inner is None else inner.make(upstream)

        def step(self: Any) -> Any:
            return auto.step(lambda: take(self))

        return step

    target = "megatron.core.optimizer.optimizer:ChainedOptimizer.step"
    plain = Patch(target=target, parameters=("self",), make=make)
    return plain if inner is None else replace(inner, make=make)
