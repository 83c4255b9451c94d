"""Patch ``megatron.core.pipeline_parallel.schedules.get_forward_backward_func``.

Why: Megatron picks its schedule from the parallel sizes alone; a caller cannot add one.
Change: training and evaluation run our plan (paper Sec. III-B, Algorithm 1).
Remove when: ``ModelParallelConfig`` accepts a schedule.
"""

from collections.abc import Callable
from typing import Any

from fold3d_patches.registry import Patch, replace


def patch(executor: Callable[..., Any]) -> Patch:
    """Return the patch; ``executor`` takes the keywords of Megatron's schedule functions."""
    return replace(
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        lambda *_args, **_kwargs: executor,
        rebinds=(
            "megatron.core.pipeline_parallel:get_forward_backward_func",
            "megatron.training.training:get_forward_backward_func",
            "megatron.bridge.training.train:get_forward_backward_func",
            "megatron.bridge.training.eval:get_forward_backward_func",
        ),
    )
