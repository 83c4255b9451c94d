"""Patch an iteration, its computations and its optimizer step, to record when each runs.

Why: only the training loop knows where an iteration begins and ends, and its number. Stock's
    schedules have no plan, so their computations must be recorded where they run. Megatron's
    ``step`` alternates between updating parameters and waiting for other ranks.
Change: a trace begins and ends with ``train_step``. It gets each forward and backward of stock's
    under the name that a plan would give it, and of a step the updates; the rest is waiting.
Remove when: Megatron calls hooks around an iteration, a computation and an optimizer's update.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from fold3d_patches.registry import Patch, around
from megatron.fold3d.runtime.trace.tracer import Tracer

Func = Callable[..., Any]

_BRIDGE = "megatron.bridge.training.train"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def iteration(tracer: Tracer) -> Iterator[Patch]:
    """Yield the patch of an iteration, from zeroing the gradients to the optimizer step.

    Megatron-Bridge has a function of its own for it, which is patched if it is imported.
    """

    @around(
        "megatron.training.training:train_step",
        parameters="forward_step_func data_iterator model / iteration",
    )
    def recorded(upstream: Func, *args: Any, iteration: int, **kwargs: Any) -> Any:
        _, _, model, *_ = args
        with tracer.iteration(iteration + 1, model):  # as the log counts
            return upstream(*args, iteration=iteration, **kwargs)

    @around(
        f"{_BRIDGE}:train_step",
        parameters="forward_step_func data_iterator model optimizer scheduler global_state /",
    )
    def of_bridge(upstream: Func, *args: Any) -> Any:
        _, _, model, _, _, state, *_ = args
        with tracer.iteration(state.train_state.step + 1, model):
            return upstream(*args)

    yield recorded
    if _BRIDGE in sys.modules:
        yield of_bridge


def updates(tracer: Tracer) -> tuple[Patch, ...]:
    """Return the patches of the two parts of an optimizer step that compute."""

    def recorded(upstream: Func, optimizer: Any) -> Any:
        # A step of one stage is an action; that of all stages follows the program.
        with tracer.recorder.span(tracer.recorder.running or "optimizer", "optimizer"):
            return upstream(optimizer)

    step = "megatron.core.optimizer.optimizer:ChainedOptimizer"
    return tuple(
        around(f"{step}.{name}", parameters="self /")(recorded)
        for name in ("prepare_grads", "step_with_ready_grads")
    )


def computations(tracer: Tracer) -> tuple[Patch, ...]:
    """Return the patches of stock's computations; our executor records its own.

    A backward is named by the forward of its output.
    """
    recorder = tracer.recorder
    # Stage and micro-batch, by the id of an output, which stays alive until its backward.
    forwards: dict[int, tuple[int, int]] = {}

    @around(f"{_SCHEDULES}:forward_step", parameters="vp_stage current_microbatch")
    def forward(upstream: Func, *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_on:
            return upstream(*args, **kwargs)
        stage, number = tracer.stage(kwargs.get("vp_stage") or 0), kwargs["current_microbatch"]
        with recorder.span(f"{stage}F{number}", "compute"):
            output, num_tokens = upstream(*args, **kwargs)
        forwards[id(output)] = stage, number
        return output, num_tokens

    @around(f"{_SCHEDULES}:backward_step", parameters="input_tensor output_tensor /")
    def backward(upstream: Func, input_tensor: Any, output_tensor: Any, *others: Any) -> Any:
        if not recorder.is_on:
            return upstream(input_tensor, output_tensor, *others)
        stage, number = forwards.pop(id(output_tensor))
        with recorder.span(f"{stage}B{number}", "compute"):
            return upstream(input_tensor, output_tensor, *others)

    return forward, backward
