"""Linear layers with Transformer Engine's contract for delayed weight gradients, on CPUs.

Written after Transformer Engine 2.8 to 2.20 (``pytorch/module``): what a module does with its
``wgrad_store``, what its backward returns then, and what ``backward_dw`` expects and leaves. The
matmuls, and tensor parallelism, are those of Megatron's own layers. `installed` puts them where
Megatron's ``TESpecProvider`` puts Transformer Engine's.
"""

import queue
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP


class WeightGradStore:
    """Operands and matmuls, first in, first out."""

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        self.context: Any = queue.Queue() if delay_wgrad_compute else None
        self.enabled = delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        return self.enabled

    def put(self, tensors: list[Any], matmul: Any) -> None:
        assert self.enabled
        self.context.put([tensors, matmul])

    def pop(self) -> Any:
        assert self.enabled
        if self.context.qsize() == 0:
            raise RuntimeError("Pop empty queue")
        tensors, matmul = self.context.get()
        return matmul(*tensors), tensors


class EngineModule(torch.nn.Module):
    """What Transformer Engine's modules have in common; ``fuses`` adds to ``main_grad``."""

    fuses = False

    def begin_engine(self, *, use_bias: bool) -> None:
        self.fuse_wgrad_accumulation = self.fuses
        self.use_bias = use_bias
        self.wgrad_store = WeightGradStore()

    def backward_dw(self) -> None:
        if not self.wgrad_store.delay_wgrad_compute():
            return
        (weight_grad, bias_grad), _ = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = weight_grad.to(self.weight.dtype)
        if self.use_bias and self.bias.grad is None:
            self.bias.grad = bias_grad.to(self.bias.dtype)

    def engine_linear(self, input: Any, weight: Any, bias: Any, **kwargs: Any) -> Any:  # noqa: A002
        parallel = kwargs["allreduce_dgrad"], kwargs["sequence_parallel"], kwargs["tp_group"]
        return _Linear.apply(input, weight, bias, self, parallel)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, module: Any, parallel: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.module, ctx.parallel = bias, module, parallel
        ctx.origin = weight  # the parameter itself
        _, sequence_parallel, group = parallel
        whole = gather_from_sequence_parallel_region(x, group=group) if sequence_parallel else x
        output = whole.matmul(weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, output_grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        all_reduce, sequence_parallel, group = ctx.parallel
        input_grad = output_grad.matmul(weight)
        if sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=group)
            input_grad = reduce_scatter_to_sequence_parallel_region(input_grad, group=group)
        elif all_reduce:
            input_grad = reduce_from_tensor_model_parallel_region(input_grad, group=group)
        origin, has_bias = ctx.origin, ctx.bias is not None
        fused = ctx.module.fuse_wgrad_accumulation

        def matmul(x: Any, dy: Any) -> Any:
            x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
            weight_grad = dy.t().matmul(x)
            if fused:
                origin.main_grad.add_(weight_grad)
            return weight_grad, dy.sum(dim=0) if has_bias else None

        store: WeightGradStore = ctx.module.wgrad_store
        weight_grad = bias_grad = None
        if store.delay_wgrad_compute():
            store.put([x, output_grad], matmul)
        else:
            weight_grad, bias_grad = matmul(x, output_grad)
        if fused:
            origin.grad_added_to_main_grad = True
            weight_grad = torch.full_like(origin, torch.nan)  # a dummy, whose values are undefined
        return input_grad, weight_grad, bias_grad, None, None


class _Wrapped(EngineModule):
    """Megatron's wrapper of a module: it delays nothing without Megatron's own flag."""

    __module__ = "megatron.core.extensions.transformer_engine"

    def _forward_impl(self, input: Any, weight: Any, bias: Any, **kwargs: Any) -> Any:  # noqa: A002
        return self.engine_linear(input, weight, bias, **kwargs)

    def backward_dw(self) -> None:
        if self.config.delay_wgrad_compute:
            super().backward_dw()


class Column(_Wrapped, ColumnParallelLinear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ColumnParallelLinear.__init__(self, *args, **kwargs)
        self.begin_engine(use_bias=self.bias is not None)


class NormColumn(Column):
    """A norm and a linear layer in one, whose norm's gradients are computed in the backward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(self.input_size))
        self.layer_norm_bias = torch.nn.Parameter(torch.zeros(self.input_size))
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            parameter.sequence_parallel = self.sequence_parallel

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        normed = torch.nn.functional.layer_norm(x, (self.input_size,), weight, bias)
        return super().forward(normed, *args, **kwargs)


class Row(_Wrapped, RowParallelLinear):
    """As Transformer Engine's with ``return_bias``: it has a bias, and does not add it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        RowParallelLinear.__init__(self, *args, **kwargs)
        self.begin_engine(use_bias=self.bias is not None)


class Grouped(torch.nn.Module):
    """The matmuls of several experts, one after the other: Transformer Engine's ``GroupedLinear``.

    Its weights are parameters of their own, ``weight0`` and so on.
    """

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, init_method: Any, **_: Any
    ) -> None:
        super().__init__()
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size))
            init_method(weight.data)
            weight.allreduce = False  # replicas that share experts have others
            self.register_parameter(f"weight{number}", weight)

    def forward(self, tokens: Any, sizes: list[int]) -> Any:
        parts = zip(tokens.split(sizes), self.parameters(), strict=True)
        return torch.cat([part.matmul(weight.t()) for part, weight in parts]), None


class Provider(LocalSpecProvider):
    def column_parallel_linear(self) -> type:
        return Column

    def row_parallel_linear(self) -> type:
        return Row

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumn

    def layer_norm(self, *args: Any, has_residual: bool = False, **kwargs: Any) -> Any:
        return super().layer_norm(*args, **kwargs)

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        if not moe_use_grouped_gemm:
            return super().grouped_mlp_modules(moe_use_grouped_gemm)
        return partial(TEGroupedMLP, submodules=GroupedMLPSubmodules(Grouped, Grouped))


@contextmanager
def installed(*, fuses: bool = False) -> Iterator[None]:
    """Let Megatron build models of these modules with ``--transformer-impl transformer_engine``."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import random

    from fold3d_patches.cpu import flags

    module = ModuleType("transformer_engine")
    module.__spec__ = ModuleSpec("transformer_engine", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformer_engine", module)
        patch.setattr(flags, "check", lambda _: None)  # kernels for GPUs are not used here
        patch.setattr(EngineModule, "fuses", fuses)
        patch.setattr(gpt_layer_specs, "TESpecProvider", Provider)
        without_fp8 = SimpleNamespace(is_fp8_enabled=lambda: False)
        patch.setattr(random, "FP8GlobalStateManager", without_fp8, raising=False)
        for name in ("activation_recompute_forward", "fp8_autocast"):
            patch.setattr(random, name, lambda **_: nullcontext(), raising=False)
        yield
