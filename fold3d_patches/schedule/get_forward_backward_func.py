"""Patch ``megatron.core.pipeline_parallel.schedules.get_forward_backward_func``.

Why: Megatron picks its schedule from the parallel sizes alone; a caller cannot add one.
Change: training and evaluation run our plan (paper Sec. III-B, Algorithm 1).
Remove when: ``ModelParallelConfig`` accepts a schedule.
"""

from collections.abc import Callable
from typing import Any

from fold3d_patches.registry import Patch


def patch(executor: Callable[..., Any]) -> Patch:
    """Return the patch; ``executor`` takes the keywords of Megatron's schedule functions."""

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        def get_forward_backward_func(
            pp_size: int | None = None,
            vp_size: int | None = None,
            schedule_pg_collection: Any = None,
        ) -> Callable[..., Any]:
            return executor

        return get_forward_backward_func

    return Patch(
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        rebinds=(
            "megatron.core.pipeline_parallel:get_forward_backward_func",
            "megatron.training.training:get_forward_backward_func",
        ),
        parameters=("pp_size", "vp_size", "schedule_pg_collection"),
        make=make,
    )
