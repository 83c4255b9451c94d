"""Patch ``megatron.core.pipeline_parallel.schedules.forward_step`` and ``backward_step``.

Why: stock's schedules have no plan, so their computations must be recorded where they run.
Change: a trace gets each forward and backward under the name that a plan would give it.
Remove when: Megatron's schedules call hooks around their computations.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.trace.tracer import Tracer

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def patches(tracer: "Tracer") -> tuple[Patch, ...]:
    """Return the patches of both steps; a backward is named by the forward of its output."""
    recorder = tracer.recorder
    # Stage and micro-batch, by the id of an output, which stays alive until its backward.
    forwards: dict[int, tuple[int, int]] = {}

    def make_forward(upstream: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            if not recorder.is_on:
                return upstream(*args, **kwargs)
            stage, number = tracer.stage(kwargs.get("vp_stage") or 0), kwargs["current_microbatch"]
            with recorder.span(f"{stage}F{number}", "compute"):
                output, num_tokens = upstream(*args, **kwargs)
            forwards[id(output)] = stage, number
            return output, num_tokens

        return forward_step

    def make_backward(upstream: Callable[..., Any]) -> Callable[..., Any]:
        def backward_step(
            input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any
        ) -> Any:
            arguments = input_tensor, output_tensor, output_tensor_grad, config
            if not recorder.is_on:
                return upstream(*arguments)
            stage, number = forwards.pop(id(output_tensor))
            with recorder.span(f"{stage}B{number}", "compute"):
                return upstream(*arguments)

        return backward_step

    return (
        Patch(
            target=f"{_SCHEDULES}:forward_step",
            parameters=(
                *("forward_step_func", "data_iterator", "model", "num_microbatches"),
                *("input_tensor", "forward_data_store", "config", "cp_group_size"),
                *("collect_non_loss_data", "checkpoint_activations_microbatch"),
                *("is_first_microbatch", "current_microbatch", "vp_stage", "is_last_stage"),
            ),
            make=make_forward,
        ),
        Patch(
            target=f"{_SCHEDULES}:backward_step",
            parameters=("input_tensor", "output_tensor", "output_tensor_grad", "config"),
            make=make_backward,
        ),
    )
