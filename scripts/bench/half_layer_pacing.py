"""Patch ``Attention.forward``, and ``MLP.forward`` or ``SequentialMLP.forward`` of Megatron-core.

Why: ranks that share a few CPU cores disturb each other, and a layer is too large a unit to pace
    where two micro-batches take turns inside it.
Change: each half of a layer sleeps before it computes, and once more behind its backward. A rank
    that sleeps counts as computing: it keeps what it computes with to itself. With experts the
    second half is all local ones together; routing, permutation and the all-to-alls are real, and
    not slept.
Remove when: every rank of the bench has an accelerator of its own.
"""

import time
from typing import Any

import torch

from fold3d_patches.registry import Patch, around


class _Slow(torch.autograd.Function):
    """Identity that sleeps, and sleeps in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


def patches(forward_s: float, backward_s: float, *, experts: bool) -> tuple[Patch, ...]:
    """Let each half of a layer sleep; the times are those of one micro-batch."""

    def forward(
        upstream: Any, self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        slowed = _Slow.apply(hidden_states, forward_s, backward_s)  # type: ignore[no-untyped-call]
        return upstream(self, slowed, *args, **kwargs)

    transformer = "megatron.core.transformer"
    second = "moe.experts:SequentialMLP" if experts else "mlp:MLP"
    return (
        around(f"{transformer}.attention:Attention.forward")(forward),
        around(f"{transformer}.{second}.forward")(forward),
    )
