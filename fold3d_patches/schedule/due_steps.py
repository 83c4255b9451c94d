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
from typing import Any

from fold3d_patches.registry import Patch, around
from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps

Func = Callable[..., Any]

_CHUNK = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"


def patches(due: DueSteps) -> tuple[Patch, ...]:
    """Return the patches of the end of an iteration, of checkpoints, and of a chunk's gradients."""

    @around(
        "megatron.training.training:checkpoint_and_decide_exit",
        parameters="model optimizer opt_param_scheduler iteration /",
    )
    def decide_exit(
        upstream: Func, model: Any, optimizer: Any, scheduler: Any, iteration: int, *others: Any
    ) -> Any:
        from megatron.training import get_args

        exits = upstream(model, optimizer, scheduler, iteration, *others)
        if exits or iteration >= get_args().train_iters:  # all ranks decide alike
            due.take_all()
        return exits

    @around(
        "megatron.training.checkpointing:save_checkpoint",
        rebinds=("megatron.training.training:save_checkpoint",),
    )
    def save(upstream: Func, *args: Any, **kwargs: Any) -> Any:
        due.take_all()
        return upstream(*args, **kwargs)

    scale = around(f"{_CHUNK}.scale_gradients", parameters="self scaling_factor /")(due.scale)
    zero = around(f"{_CHUNK}.zero_grad_buffer", parameters="self /")(due.zero)
    return decide_exit, save, scale, zero
