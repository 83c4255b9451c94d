"""Patch ``megatron.core.distributed.DistributedDataParallel._make_backward_post_hook``.

Why: DDP adds a gradient to its buffer when the backward has computed it, and fails without one.
    In a split backward of Transformer Engine's modules the weight gradients come later.
Change: for those weights the hook runs after ``backward_dw``, as with ``--delay-wgrad-compute``.
Remove when: ``--delay-wgrad-compute`` works under any schedule, and for some of a rank's chunks.
"""

from collections.abc import Callable
from typing import Any

import torch

from fold3d_patches.registry import Patch, around
from megatron.fold3d.runtime.weight_grads.engine_modules import EngineWeightGrads


def patch(delayed: EngineWeightGrads) -> Patch:
    """Return the patch of the function that DDP calls when a parameter's gradient is ready."""
    ddp = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"

    @around(f"{ddp}._make_backward_post_hook", parameters="self param /")
    def make_hook(upstream: Callable[..., Any], ddp: Any, param: torch.nn.Parameter) -> Any:
        add_gradient = upstream(ddp, param)

        def hook(*unused: Any) -> None:
            if not delayed.puts_off(param, add_gradient):
                add_gradient(*unused)

        return hook

    return make_hook
