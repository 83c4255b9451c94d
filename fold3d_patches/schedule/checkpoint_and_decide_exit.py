"""Patch ``megatron.training.training.checkpoint_and_decide_exit``.

Why: when training ends, some optimizer steps may still be due, and Megatron closes its writers
    before our patches are undone.
Change: after the last iteration these steps are taken, so that its gradient norm is written.
Remove when: Megatron calls a hook at the end of training.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps


def patch(due: "DueSteps") -> Patch:
    """Return the patch of the end of an iteration; all ranks take the same decision."""

    def make(upstream: Callable[..., bool]) -> Callable[..., bool]:
        from megatron.training import get_args

        def checkpoint_and_decide_exit(
            model: Any, optimizer: Any, opt_param_scheduler: Any, iteration: int, *others: Any
        ) -> bool:
            exits = upstream(model, optimizer, opt_param_scheduler, iteration, *others)
            if exits or iteration >= get_args().train_iters:
                due.drain()
            return exits

        return checkpoint_and_decide_exit

    return Patch(
        target="megatron.training.training:checkpoint_and_decide_exit",
        parameters=(
            *("model", "optimizer", "opt_param_scheduler", "iteration"),
            *("num_floating_point_operations_so_far", "checkpointing_context"),
            "train_data_iterator",
        ),
        make=make,
    )
