"""Binds fold3d to Megatron: the ordered list of patches, and nothing else."""

from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

from fold3d_patches.registry import Patch, PatchError, apply

if TYPE_CHECKING:
    from megatron.fold3d.config import Fold3DConfig

__all__ = ["Patch", "PatchError", "install"]


def install(config: "Fold3DConfig") -> ExitStack:
    """Patch Megatron for this run; closing the stack restores it.

    Raises:
        PatchError: the installed Megatron is not the one the patches were written for.
    """
    from fold3d_patches import (
        compile_helpers,
        cpu,
        get_forward_backward_func,
        optimizer_step,
        save_checkpoint,
        zero_grad_buffer,
    )

    deferred = None
    patches: list[Patch] = [compile_helpers.patch()]
    if config.device == "cpu":
        patches += cpu.patches()
    if config.schedule != "stock":
        from megatron.fold3d.runtime.deferred_sync import DeferredSync
        from megatron.fold3d.runtime.executor import Executor
        from megatron.fold3d.runtime.plans import Plans

        if config.backward_share is not None:
            timeout = timedelta(minutes=config.distributed_timeout_minutes)
            deferred = DeferredSync(config.backward_share, timeout)
            patches += [
                optimizer_step.patch(deferred),
                save_checkpoint.patch(deferred),
                zero_grad_buffer.patch(deferred),
            ]
        executor = Executor(config, Plans(config), deferred)
        patches.append(get_forward_backward_func.patch(executor))
    stack = apply(patches)
    if deferred is not None:
        stack.push(deferred)
    return stack
