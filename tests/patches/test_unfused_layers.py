"""Without apex Megatron's own layers run, and the flag still holds for Transformer Engine's."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from fold3d_patches import cpu, unfused_layers
from fold3d_patches.registry import apply


def test_layers_of_megatron_run_without_apex_though_gradients_are_to_be_fused() -> None:
    config = ModelParallelConfig(gradient_accumulation_fusion=True, use_cpu_initialization=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    given = {
        "config": config,
        "init_method": torch.nn.init.ones_,
        "bias": False,
        "skip_bias_add": False,
        "tp_group": dist.group.WORLD,
    }
    try:
        with apply([*cpu.patches(), *unfused_layers.PATCHES]):
            row = RowParallelLinear(4, 2, input_is_parallel=True, **given)
            column = ColumnParallelLinear(2, 4, **given)
            output, _ = column(row(torch.ones(3, 4))[0])
            output.sum().backward()
        with apply(cpu.patches()), pytest.raises(RuntimeError, match="fused_weight_gradient"):
            ColumnParallelLinear(2, 4, **given)
    finally:
        dist.destroy_process_group()
    assert column.weight.grad.tolist() == [[12.0, 12.0]] * 4
    assert config.gradient_accumulation_fusion  # of Transformer Engine's layers
