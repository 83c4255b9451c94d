"""Patch ``megatron.core.tensor_parallel.layers.linear_with_grad_accumulation_and_async_allreduce``.

Why: the backward of a linear layer computes the gradient of its weight at once, but a plan may
    compute it later, to overlap DP.sync.
Change: for weights with delayed gradients the backward keeps the operands of these gradients.
`DelayedWeightGrads.linear` gives shapes, owners and streams of the tensors.
Remove when: Megatron's ``--delay-wgrad-compute`` works under any schedule, for its own layers too.
"""

from collections.abc import Callable
from typing import Any

import torch

from fold3d_patches.registry import Patch, around
from megatron.fold3d.runtime.weight_grads.delayed_linear import DelayedWeightGrads


def patch(delayed: DelayedWeightGrads) -> Patch:
    """Return the patch of the function behind column- and row-parallel linear layers."""
    module = "megatron.core.tensor_parallel"
    name = "linear_with_grad_accumulation_and_async_allreduce"

    @around(
        f"{module}.layers:{name}",
        rebinds=(f"{module}:{name}",),
        parameters="input weight / bias allreduce_dgrad sequence_parallel tp_group",
    )
    def linear(
        upstream: Callable[..., Any],
        input: torch.Tensor,  # noqa: A002 - upstream's name, which a caller may give
        weight: torch.Tensor,
        *args: Any,
        **named: Any,
    ) -> Any:
        if not delayed.concerns(weight):
            return upstream(input, weight, *args, **named)
        # Layers give all of these by name.
        of_ranks = {n: named[n] for n in ("allreduce_dgrad", "sequence_parallel", "tp_group")}
        return delayed.linear(input, weight, named["bias"], **of_ranks)

    return linear
