"""Weight gradients apart from their backward, in one layer of Megatron's."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.runtime.weight_grads.delayed_linear import DelayedWeightGrads

pytestmark = pytest.mark.gloo


def test_operands_are_freed_with_their_weight_gradients() -> None:
    delayed, weight = DelayedWeightGrads(), torch.nn.Parameter(torch.ones(2, 3))
    x: torch.Tensor | None = torch.ones(4, 1, 3)
    freed = weakref.ref(x)

    def run_backward(_: Action) -> None:
        delayed._keep(weight, None, None, x, torch.ones(4, 1, 2))

    program = tuple(map(Action.from_str, ("0F0", "0B0", "0W0")))
    iteration: Any = SimpleNamespace(program=program)
    handlers = delayed.handlers(iteration, {Op.BACKWARD: run_backward})
    handlers[Op.BACKWARD](program[1])
    x = None
    assert freed() is not None
    handlers[Op.WEIGHT](program[2])
    assert freed() is None
    assert weight.grad is not None
