"""Patch a step of Megatron's optimizers, and the start of its all-gathers of parameters.

Why: the distributed optimizer gathers every parameter whole, 16 bits each, although all replicas
    hold the old ones; and no hook lies between a step and its all-gather.
Change: with ``--delta-param-gather``, what a step has changed is coded behind it, and gathered in
    place of the parameters, which are then bit for bit the same.
Remove when: Megatron lets an optimizer say what is gathered, and decode it.
"""

from fold3d_patches.registry import Patch, around
from megatron.fold3d.runtime.grad_sync.delta_gather import DeltaGather


def patches(delta: DeltaGather) -> tuple[Patch, ...]:
    """Return the patches of a step and of an all-gather."""
    step = "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step_with_ready_grads"
    buckets = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
    return (
        around(step, parameters="self /")(delta.step),
        around(f"{buckets}.start_param_sync", parameters="self / force_sync")(delta.start),
    )
