"""Weight gradients that are computed separately from the backward, in `WEIGHT` actions.

A linear layer's backward has two matmuls. The first multiplies the output gradient with the weight
and gives the input gradient, for which the stage before waits. The second multiplies it with the
input and gives the weight gradient, for which only DP.sync waits. In stages with delayed weight
gradients, the backward runs the first matmul and keeps the operands of the second.

    stage 0                ┌── 0B0        ┌── 0B1
                           │ SEND_B       │ SEND_B
    stage 1         1B0 ───┤       1B1 ───┤         1W0    1W1 ───┐
                           │              │          │      │     └── DP.sync of stage 1
    kept                   └── x, grad ───│──────────┘      │
                                          └── x, grad ──────┘

Keeps one invariant: the operations, and the order in which a weight's gradients are accumulated,
are those of Megatron's own backward, so that sums are equal bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LinearWithGradAccumulationAndAsyncCommunication,
    RowParallelLinear,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.runtime.weight_grads.by_parameter import SplitBackwards
from megatron.fold3d.upstream.versions import last_linear_arguments


class _Kept(NamedTuple):
    """The operands of one weight's gradient in one backward, and of its bias's.

    Attributes:
        weight: ``[output, hidden]``, the model's parameter.
        bias: ``[output]``, the model's parameter; None if the layer has none, or it is frozen.
        shards: the tensor-parallel ranks that each have a shard of the input; None if it is whole.
        uses: of each use of the weight its input, ``[seq, batch, hidden]`` or this rank's shard of
            seq, and the gradient of its output, ``[seq, batch, output]`` in the dtype of the input.
            This tuple keeps both alive. They are in the order in which autograd reaches the uses.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    shards: Any
    uses: tuple[tuple[torch.Tensor, ...], ...]


# By weight and call of the autograd engine, which adds up the gradients of a weight's uses before
# DDP adds them to its buffer. A recomputed layer's backward is a call of its own, within another.
_Backward = dict[tuple[torch.Tensor, int], _Kept]


class DelayedWeightGrads(SplitBackwards[_Kept]):
    """The weights of one rank whose gradients are delayed, and the operands kept for them.

    Args:
        side: tells which of a pair's two backwards is running: `Baton.side`.
    """

    def __init__(self, side: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._weights: frozenset[torch.Tensor] = frozenset()
        self._side = side or (lambda: 0)
        self._now: list[_Backward] = [{}, {}]  # the running backwards, by side

    def choose(self, chunks: Mapping[int, torch.nn.Module]) -> None:
        """Delay the gradients of all linear layers in the transformer layers of ``chunks``.

        The gradients of embeddings, the output layer, norms and most biases stay in the backward:
        they are cheap to compute, or their operands are large to keep.
        """
        self._weights = frozenset(
            linear.weight
            for chunk in chunks.values()
            for layer in chunk.modules()
            if isinstance(layer, TransformerLayer)
            for linear in layer.modules()
            if isinstance(linear, ColumnParallelLinear | RowParallelLinear)
        )

    def concerns(self, weight: torch.Tensor) -> bool:
        """Return True if this parameter's gradient is delayed and grad mode is on.

        ``weight`` is the model's parameter, ``[output, hidden]``; it is compared, never read.
        """
        return torch.is_grad_enabled() and weight in self._weights

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
    ) -> torch.Tensor:
        """Return ``x @ weight.T + bias``, differentiable with respect to ``x`` only.

        `compute` adds the gradients of ``weight`` and ``bias``. Until then ``x`` and the gradient
        of the output are kept. All tensors have one dtype and are valid on the current stream.

        Args:
            x: ``[seq, batch, hidden]``; with sequence parallelism this rank's shard of seq.
            weight: ``[output, hidden]``, the model's parameter.
            bias: ``[output]``, the model's parameter.
            allreduce_dgrad: whether the input gradient is all-reduced over ``tp_group``.
            sequence_parallel: whether the input is a shard of the sequence, to be all-gathered.

        Returns:
            ``[seq, batch, output]``, with the whole seq; the caller owns it.
        """
        trained = bias if bias is not None and bias.requires_grad else None
        keep = partial(self._keep, weight, trained, tp_group if sequence_parallel else None)
        # Megatron notes in the weight that its gradient is fused, so it gets an alias. This is a
        # parameter too: whether a matmul is folded into one of matrices, and so how it rounds,
        # depends on whether the weight requires a gradient.
        alias = torch.nn.Parameter(weight.detach())
        fuses, buffer, limit = True, list[Any](), 0  # so Megatron leaves out the weight's gradient
        output: torch.Tensor = _Linear.apply(
            *(keep, x, alias, None, fuses, allreduce_dgrad, sequence_parallel),
            *(buffer, limit, tp_group),
            *last_linear_arguments(),
        )
        return output if bias is None else output + bias.detach()

    @contextmanager
    def keeping(self, backward: Action) -> Iterator[None]:
        """Keep the operands of a backward's weight gradients."""
        now = self._now[self._side()] = {}
        self._kept[backward.stage, backward.microbatch] = now.values()
        yield
        self._now[self._side()] = {}  # or operands would outlive their `compute`

    def _parameters(self, item: _Kept) -> Sequence[torch.Tensor]:
        return (item.weight,) if item.bias is None else (item.weight, item.bias)

    def _add(self, items: Iterable[_Kept]) -> None:
        """Compute and accumulate the gradients of some weights, each item's at once."""
        params: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        added: set[torch.Tensor] = set()
        for weight, bias, shards, uses in items:
            if weight in added:
                torch.autograd.backward(params, grads)
                params, grads, added = [], [], set()
            added.add(weight)
            for x, output_grad in uses:
                if shards is not None:
                    x = gather_from_sequence_parallel_region(x, group=shards)
                output_grad, x = prepare_input_tensors_for_wgrad_compute(output_grad, x)
                params.append(weight)
                grads.append(output_grad.t().matmul(x))
                if bias is not None:
                    params.append(bias)
                    grads.append(output_grad.sum(dim=0))
        torch.autograd.backward(params, grads)

    def _keep(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shards: Any,
        *operands: torch.Tensor,
    ) -> None:
        now = self._now[self._side()]
        key = weight, torch._C._current_graph_task_id()
        before = now.pop(key).uses if key in now else ()  # it is due where its last use is
        now[key] = _Kept(weight, bias, shards, (*before, operands))


class _Linear(LinearWithGradAccumulationAndAsyncCommunication):  # type: ignore[misc]
    """Megatron's linear layer, whose backward keeps the operands of the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, keep: Callable[[torch.Tensor, torch.Tensor], None], *args: Any) -> Any:
        ctx.keep = keep
        return LinearWithGradAccumulationAndAsyncCommunication.forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, output_grad: torch.Tensor) -> tuple[Any, ...]:
        ctx.keep(ctx.saved_tensors[0].detach(), output_grad)
        grads = LinearWithGradAccumulationAndAsyncCommunication.backward(ctx, output_grad)
        return None, *grads
