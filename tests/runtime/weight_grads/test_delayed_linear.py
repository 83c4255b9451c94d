"""Weight gradients apart from their backward, in one layer of Megatron's."""

from collections.abc import Mapping

import pytest
import torch

from megatron.fold3d.plan.ir import Action
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


def train() -> tuple[Digests, Digests, Digests, bool]:
    """Run two micro-batches through a layer, whole and split."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    import fold3d_patches
    from fold3d_patches.schedule import linear
    from megatron.fold3d.runtime.weight_grads.delayed_linear import DelayedWeightGrads

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
                delayed.begin_backward(Action.from_str(f"0B{microbatch}"))
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
