"""Steps taken in parts end where one step of everything ends, for optimizers that count steps."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed

pytestmark = pytest.mark.gloo

LEARNING_RATES = (0.1, 0.4, 0.2)


class CountsPerGroup(torch.optim.Optimizer):
    """Counts steps as the fused optimizers of apex and Transformer Engine do."""

    def step(self, closure: Callable[..., Any] | None = None) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                change = p.grad / group["step"] + group["weight_decay"] * p
                p.sub_(change, alpha=group["lr"])


def test_parts_in_any_order_end_where_a_whole_step_ends() -> None:
    (ends,) = run_distributed(train, 1)
    whole, *parted = ends
    assert len(parted) == 3
    assert all(end == whole for end in parted)


def train() -> list[tuple[list[list[float]], list[Any], list[float]]]:
    """Train one model with a whole step per iteration, and in parts, each order of parts once."""
    from megatron.core import parallel_state

    import fold3d_patches

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    with fold3d_patches.install_platform("cpu"):
        # The parameters of both groups, of one alone, and of none.
        return [
            steps(parts) for parts in ((), ([0, 2], [1, 3]), ([2, 3], [0, 1]), ([], [0, 1, 2, 3]))
        ]


def steps(parts: Sequence[list[int]]) -> tuple[list[list[float]], list[Any], list[float]]:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

    from megatron.fold3d.runtime.grad_sync.partial_step import PartialStep

    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.rand(3, generator=generator)) for _ in range(4)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.3}]
    inner = CountsPerGroup(groups, {"lr": 0.0, "weight_decay": 0.1})
    config = OptimizerConfig(lr=1.0, clip_grad=0.0)
    optimizer = ChainedOptimizer([FP32Optimizer(inner, config, lambda *_: None)])
    norms = []
    for lr in LEARNING_RATES:
        for parameter in parameters:
            parameter.main_grad = torch.rand(3, generator=generator)
        for group in inner.param_groups:
            group["lr"] = lr
        if not parts:
            _, norm, _ = optimizer.step()
            optimizer.zero_grad()
        else:
            late = PartialStep(optimizer)
            for number, part in enumerate(parts):
                for group in inner.param_groups if number else ():
                    group["lr"], group["weight_decay"] = 7.0, 7.0  # the scheduler went on
                before = [group["weight_decay"] for group in inner.param_groups]
                late.take(parameters[index] for index in part)
                assert [group["weight_decay"] for group in inner.param_groups] == before
            for group, weight_decay in zip(inner.param_groups, (0.1, 0.3), strict=True):
                group["weight_decay"] = weight_decay
            norm = late.grad_norm()
        norms.append(round(norm, 5))
    assert all(parameter.grad is None for parameter in parameters)
    counts = [group["step"] for group in inner.param_groups]
    return [parameter.tolist() for parameter in parameters], counts, norms
