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
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.runtime.weight_grads.by_parameter import SplitBackwards


class Parallel(NamedTuple):
    """How a linear layer's input is distributed over tensor-parallel ranks.

    Attributes:
        allreduce_dgrad: whether the input gradient is all-reduced over ``tp_group``.
        sequence_parallel: whether the input is a shard of the sequence, to be all-gathered.
        tp_group: the tensor-parallel process group; None is Megatron's.
    """

    allreduce_dgrad: bool
    sequence_parallel: bool
    tp_group: Any

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return the matmul's input, ``[seq, batch, hidden]``: ``x``, all-gathered if needed.

        With sequence parallelism ``x`` is this rank's shard of seq. Both are valid on the current
        stream.
        """
        if self.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=self.tp_group)
        return x

    def own(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``x``, in its shape, from ``grad``, that of `whole`.

        It is all-reduced, or reduce-scattered with sequence parallelism, and valid on the current
        stream.
        """
        if self.sequence_parallel:
            grad = reduce_scatter_to_sequence_parallel_region(grad, group=self.tp_group)
        elif self.allreduce_dgrad:
            grad = reduce_from_tensor_model_parallel_region(grad, group=self.tp_group)
        return grad


class _Kept(NamedTuple):
    """The operands of one weight's gradient, and of its bias's.

    Attributes:
        weight: ``[output, hidden]``, the model's parameter.
        bias: ``[output]``, the model's parameter.
        parallel: how ``input`` is distributed over tensor-parallel ranks.
        input: ``[seq, batch, hidden]``, or this rank's shard of seq; kept alive by this tuple.
        output_grad: ``[seq, batch, output]``, in the dtype of the input; also kept alive by it.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    parallel: Parallel
    input: torch.Tensor
    output_grad: torch.Tensor


class DelayedWeightGrads(SplitBackwards[_Kept]):
    """The weights of one rank whose gradients are delayed, and the operands kept for them.

    Args:
        side: tells which of a pair's two backwards is running: `Baton.side`.
    """

    def __init__(self, side: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._weights: frozenset[torch.Tensor] = frozenset()
        self._side = side or (lambda: 0)
        self._now: list[list[_Kept]] = [[], []]  # of the running backwards, by side

    def choose(self, chunks: Mapping[int, torch.nn.Module]) -> None:
        """Delay the gradients of all linear layers in the transformer layers of ``chunks``.

        The gradients of embeddings, the output layer, norms and most biases stay in the backward:
        they are cheap to compute, or their operands are large to keep.

        Args:
            chunks: the model chunk of each stage whose weight gradients are delayed.
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
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parallel: Parallel
    ) -> torch.Tensor:
        """Return ``x @ weight.T + bias``, differentiable with respect to ``x`` only.

        `compute` adds the gradients of ``weight`` and ``bias``. Until then ``x`` and the gradient
        of the output are kept. All tensors have one dtype and are valid on the current stream.

        Args:
            x: ``[seq, batch, hidden]``; with sequence parallelism this rank's shard of seq.
            weight: ``[output, hidden]``, the model's parameter.
            bias: ``[output]``, the model's parameter.
            parallel: how ``x`` is distributed over tensor-parallel ranks.

        Returns:
            ``[seq, batch, output]``, with the whole seq; the caller owns it.
        """
        keep = partial(self._keep, weight, bias, parallel)
        output: torch.Tensor = _Linear.apply(x, (weight, bias), parallel, keep)  # type: ignore[no-untyped-call]
        return output

    @contextmanager
    def keeping(self, backward: Action) -> Iterator[None]:
        """Keep the operands of a backward's weight gradients."""
        self._now[self._side()] = self._kept[backward.stage, backward.microbatch] = []
        yield
        self._now[self._side()] = []  # or operands would outlive their `compute`

    def _parameters(self, item: _Kept) -> Sequence[torch.Tensor]:
        return (item.weight,) if item.bias is None else (item.weight, item.bias)

    def _add(self, items: Iterable[_Kept]) -> None:
        """Compute and accumulate the gradients of some weights, each of them once."""
        params, grads = [], []
        for weight, bias, parallel, x, output_grad in items:
            output_grad, x = prepare_input_tensors_for_wgrad_compute(output_grad, parallel.whole(x))
            params.append(weight)
            grads.append(output_grad.t().matmul(x))
            if bias is not None:
                params.append(bias)
                grads.append(output_grad.sum(dim=0))
        torch.autograd.backward(params, grads)

    def _keep(self, *what: Any) -> None:
        self._now[self._side()].append(_Kept(*what))


class _Linear(torch.autograd.Function):
    """Megatron's linear layer without the gradients of its weight and bias.

    Autograd does not see these two in the tuple. They stay parameters: whether a matmul is folded
    into one of matrices, and so how it rounds, depends on whether they require gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        parameters: tuple[torch.Tensor, torch.Tensor | None],
        parallel: Parallel,
        keep: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> torch.Tensor:
        weight, bias = parameters
        ctx.save_for_backward(x)
        ctx.weight, ctx.parallel, ctx.keep = weight, parallel, keep
        output = torch.matmul(parallel.whole(x), weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, output_grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.keep(x.detach(), output_grad)
        return ctx.parallel.own(output_grad.matmul(ctx.weight)), None, None, None
