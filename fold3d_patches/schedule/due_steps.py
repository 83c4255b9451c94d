"""Patch where Megatron saves, scales or zeroes what an optimizer step that is due still needs.

Why: with ``step=next`` some steps are still due when an iteration ends. Megatron may then write a
    checkpoint, or close its writers. ``finalize_model_grads`` divides all gradients by the number
    of tokens (``--calculate-per-token-loss``), and ``train_step`` zeroes them before the next
    forward.
Change: due steps are taken before a checkpoint is written, and behind the last iteration, so that
    its gradient norm is written. Gradients that are still being reduced are divided afterwards,
    and zeroed right behind their step.
Remove when: Megatron calls hooks before it reads parameters and at the end of training, and leaves
    it to the schedule when gradients are scaled and zeroed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps

_CHUNK = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"


def patches(due: "DueSteps") -> tuple[Patch, ...]:
    """Return the patches of the end of an iteration, of checkpoints, and of a chunk's gradients."""

    def make_exit(upstream: Callable[..., bool]) -> Callable[..., bool]:
        from megatron.training import get_args

        def checkpoint_and_decide_exit(
            model: Any, optimizer: Any, opt_param_scheduler: Any, iteration: int, *others: Any
        ) -> bool:
            exits = upstream(model, optimizer, opt_param_scheduler, iteration, *others)
            if exits or iteration >= get_args().train_iters:  # all ranks decide alike
                due.take_all()
            return exits

        return checkpoint_and_decide_exit

    def make_save(upstream: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            due.take_all()
            return upstream(*args, **kwargs)

        return save_checkpoint

    def make_scale(upstream: Callable[..., None]) -> Callable[..., None]:
        def scale_gradients(self: Any, scaling_factor: Any) -> None:
            if not due.defer_scaling(self, scaling_factor):
                upstream(self, scaling_factor)

        return scale_gradients

    def make_zero(upstream: Callable[..., None]) -> Callable[..., None]:
        def zero_grad_buffer(self: Any) -> None:
            if not due.defer_zeroing(self):
                upstream(self)

        return zero_grad_buffer

    return (
        Patch(
            target="megatron.training.training:checkpoint_and_decide_exit",
            parameters=(
                *("model", "optimizer", "opt_param_scheduler", "iteration"),
                *("num_floating_point_operations_so_far", "checkpointing_context"),
                "train_data_iterator",
            ),
            make=make_exit,
        ),
        Patch(
            target="megatron.training.checkpointing:save_checkpoint",
            rebinds=("megatron.training.training:save_checkpoint",),
            make=make_save,
        ),
        Patch(
            target=f"{_CHUNK}.scale_gradients",
            parameters=("self", "scaling_factor"),
            make=make_scale,
        ),
        Patch(target=f"{_CHUNK}.zero_grad_buffer", parameters=("self",), make=make_zero),
    )
