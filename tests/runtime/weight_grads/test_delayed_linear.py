"""Weight gradients apart from their backward, in one layer of Megatron's."""

import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.runtime.weight_grads.delayed_linear import DelayedWeightGrads, Parallel
from tests.distributed import run_distributed

pytestmark = pytest.mark.gloo

Digests = Mapping[str, list[float] | None]
DELAYED = {
    *("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"),
    *("self_attention.linear_proj.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"),
}


def test_delayed_weight_gradients_are_computed_on_request_and_equal_one_backward() -> None:
    ((whole, after_backwards, after_weights, in_evaluation),) = run_distributed(train, 1)
    assert {name for name, grad in after_backwards.items() if grad is None} == DELAYED
    assert after_weights == whole
    assert not in_evaluation


def test_operands_are_freed_with_their_weight_gradients() -> None:
    delayed, weight = DelayedWeightGrads(), torch.nn.Parameter(torch.ones(2, 3))
    x: torch.Tensor | None = torch.ones(4, 1, 3)
    freed = weakref.ref(x)

    def run_backward(_: Action) -> None:
        parallel = Parallel(allreduce_dgrad=False, sequence_parallel=False, tp_group=None)
        delayed._keep(weight, None, parallel, x, torch.ones(4, 1, 2))

    program = tuple(map(Action.from_str, ("0F0", "0B0", "0W0")))
    iteration: Any = SimpleNamespace(program=program)
    handlers = delayed.handlers(iteration, {Op.BACKWARD: run_backward})
    handlers[Op.BACKWARD](program[1])
    x = None
    assert freed() is not None
    handlers[Op.WEIGHT](program[2])
    assert freed() is None
    assert weight.grad is not None


def train() -> tuple[Digests, Digests, Digests, bool]:
    """Run two micro-batches through a layer, whole and split."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    import fold3d_patches
    from fold3d_patches.schedule import linear

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    delayed = DelayedWeightGrads()
    patched = fold3d_patches.registry.apply([linear.patch(delayed)])
    with fold3d_patches.install_platform("cpu"), patched:
        model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        )
        layer = build_module(get_gpt_layer_local_spec(normalization="LayerNorm"), config=config)

        def backwards() -> None:
            for microbatch in range(2):
                x = torch.full((4, 1, 16), 0.1 + microbatch).cos().requires_grad_()
                with delayed.keeping(Action.from_str(f"0B{microbatch}")):
                    layer(x, attention_mask=None)[0].sin().sum().backward()

        def grads() -> Digests:
            return {
                name: None if p.grad is None else p.grad.flatten().tolist()
                for name, p in layer.named_parameters()
            }

        backwards()
        whole = grads()
        layer.zero_grad()
        delayed.choose({0: layer})
        backwards()
        after_backwards = grads()
        for microbatch in range(2):
            delayed.compute(Action.from_str(f"0W{microbatch}"))
        with torch.no_grad():
            in_evaluation = delayed.concerns(layer.mlp.linear_fc1.weight)
        return whole, after_backwards, grads(), in_evaluation
