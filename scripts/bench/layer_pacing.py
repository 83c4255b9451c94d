"""Patch ``TransformerLayer.forward`` and DDP's waits for parameters in megatron-core, and our `W`.

Why: ranks that share a few CPU cores disturb each other, and iteration times scatter by 5-10 %.
Change: the forward and the backward of a layer each last at least a given time; what the CPU does
    not need is slept. Tensors, gradients and traffic stay real. A layer that is recomputed lasts
    a forward more. Weight gradients that are delayed take as long as a forward, which multiplies
    the same matrices, each its share, and their backward takes that much less. What DDP's hooks
    wait for inside a layer, the all-gather of its parameters, comes on top, as on a GPU.
Remove when: every rank of the bench has an accelerator of its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from fold3d_patches.registry import Patch, around
from megatron.fold3d.plan.ir import Action
from scripts.bench.processes import sleep_until

Func = Callable[..., Any]


@dataclass(slots=True)
class _Backward:
    """When the backward of one forward began; the two ends of a layer share it."""

    start_s: float = 0.0


class _LayerOutput(torch.autograd.Function):
    """Identity whose backward runs before all others of the layer, and starts the clock."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: _Backward) -> torch.Tensor:
        ctx.clock = backward
        return x.clone()  # Megatron frees the data of what it has sent; a view's cannot be

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.clock.start_s = time.monotonic()
        return grad, None


class _LayerInput(torch.autograd.Function):
    """Identity whose backward runs after all others of the layer, and waits for the clock."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: _Backward, backward_s: float) -> torch.Tensor:
        ctx.clock, ctx.backward_s = backward, backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sleep_until(ctx.clock.start_s + ctx.backward_s)
        return grad, None, None


def patches(forward_s: float, backward_s: float) -> tuple[Patch, ...]:
    """Make every layer last; the times are those of one micro-batch."""
    split: set[Any] = set()  # layers whose weight gradients are delayed
    waited_s = 0.0  # for parameters, so far
    element_s = 0.0  # of a weight's gradient
    owed_s = 0.0  # by the weight gradients of an action

    def forward(
        upstream: Func, self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        start_s, backward = time.monotonic() - waited_s, _Backward()
        rest_s = backward_s - forward_s if self in split else backward_s
        x = _LayerInput.apply(hidden_states, backward, rest_s)  # type: ignore[no-untyped-call]
        output, *rest = upstream(self, x, *args, **kwargs)
        output = _LayerOutput.apply(output, backward)  # type: ignore[no-untyped-call]
        sleep_until(start_s + waited_s + forward_s)
        return (output, *rest)

    def make_hook(upstream: Func, self: Any) -> Callable[..., None]:
        hook = upstream(self)

        def timed(*args: Any) -> None:
            nonlocal waited_s
            start_s = time.monotonic()
            hook(*args)
            waited_s += time.monotonic() - start_s

        return timed

    def choose(upstream: Func, self: Any, chunks: Any) -> None:
        nonlocal element_s
        upstream(self, chunks)
        modules = chain.from_iterable(chunk.modules() for chunk in chunks.values())
        split.clear()
        split.update(module for module in modules if isinstance(module, TransformerLayer))
        elements = sum(weight.numel() for weight in self._weights)
        element_s = forward_s * len(split) / max(1, elements)

    def add(upstream: Func, self: Any, items: Sequence[Any]) -> None:
        nonlocal owed_s
        owed_s += element_s * sum(item.weight.numel() for item in items)
        upstream(self, items)

    def compute(upstream: Func, self: Any, action: Action) -> None:
        nonlocal owed_s
        start_s, owed_s = time.monotonic(), 0.0
        upstream(self, action)
        sleep_until(start_s + owed_s)

    layer = "megatron.core.transformer.transformer_layer:TransformerLayer"
    weight_grads = "megatron.fold3d.runtime.weight_grads.delayed_linear:DelayedWeightGrads"
    ddp = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
    return (
        around(f"{layer}.forward")(forward),
        around(f"{ddp}._make_forward_pre_hook")(make_hook),
        around(f"{weight_grads}.choose")(choose),
        around(f"{weight_grads}._add")(add),
        around(f"{weight_grads}.compute")(compute),
        around(f"{weight_grads}.compute_part")(compute),
    )
