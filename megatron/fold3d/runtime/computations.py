"""Forwards and backwards through Megatron's own ``forward_step`` and ``backward_step``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    check_first_val_step,
    forward_step,
)

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.runtime.feature import Iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class Computations:
    """The innermost handlers, of FORWARD and BACKWARD.

    The options are those of Megatron's schedule functions.
    """

    iteration: Iteration
    forward_step_func: Callable[..., Any]
    data_iterators: Sequence[Any]
    collect_non_loss_data: bool
    first_val_step: bool | None

    def forward(self, action: Action) -> None:
        """Run one micro-batch's forward of a model chunk.

        Takes the input from ``inputs``, unless this is the first stage, and puts the output into
        ``outputs``, unless it is the last. In training both are in ``saved`` until the backward.
        `Iteration` documents their shapes.
        """
        this = self.iteration
        stage, _, microbatch = action
        segment = this.segment(action)
        input_tensor = this.inputs.pop((stage, microbatch), None)
        is_last_stage = stage == this.plan.num_stages - 1
        output, num_tokens = forward_step(
            self.forward_step_func,
            self.data_iterators[segment],
            this.chunks[segment],
            this.plan.num_microbatches,
            input_tensor,
            this.reports,
            this.config,
            this.groups.cp.size(),
            self.collect_non_loss_data,
            is_first_microbatch=check_first_val_step(
                self.first_val_step, not this.trains, microbatch == 0
            ),
            current_microbatch=microbatch,
            vp_stage=segment if len(this.chunks) > 1 else None,
            is_last_stage=is_last_stage,
        )
        this.num_tokens += num_tokens
        if not is_last_stage:
            this.outputs[stage, microbatch] = output
        if this.trains:
            this.saved[stage, microbatch] = input_tensor, output

    def backward(self, action: Action) -> None:
        """Run one micro-batch's backward of a model chunk.

        Takes the output's gradient from ``output_grads``, unless this is the last stage, and puts
        the input's gradient into ``input_grads``, unless it is the first.
        """
        this = self.iteration
        key = action.stage, action.microbatch
        input_tensor, output = this.saved.pop(key)
        output_grad = this.output_grads.pop(key, None)
        input_grad = backward_step(input_tensor, output, output_grad, this.config)
        if action.stage > 0:
            this.input_grads[key] = input_grad
