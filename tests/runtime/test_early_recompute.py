"""Recomputation ahead of a backward, beside Megatron's own inside it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random

from fold3d_patches import cpu
from fold3d_patches.registry import apply
from megatron.fold3d.plan.ir import Action, Op, Plan
from megatron.fold3d.runtime.early_recompute import EarlyRecompute

ITERATION: Any = SimpleNamespace(program=Plan.from_text("0F0 0F1 0R0 0B0 0B1").programs[0])
FORWARDS = [Action(0, Op.FORWARD, m) for m in range(2)]
RECOMPUTE = Action(0, Op.RECOMPUTE, 0)


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with apply(cpu.patches()):
        yield


def begin(early: EarlyRecompute, forward: Action) -> None:
    early.handlers(ITERATION, {Op.FORWARD: lambda _: None})[Op.FORWARD](forward)


class Unit(torch.nn.Module):
    """Two outputs, one of which nobody uses, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.calls: list[bool] = []

    def forward(self, x: torch.Tensor, mask: None) -> tuple[torch.Tensor, None]:
        self.calls.append(torch.is_grad_enabled())
        return torch.nn.functional.dropout(self.linear(x).tanh(), 0.5), mask


def run(early: EarlyRecompute | None, *, ahead: bool) -> tuple[Unit, list[torch.Tensor]]:
    """Two micro-batches through two units; the first may be recomputed ahead of its backward."""
    torch.manual_seed(1)
    unit, inputs = Unit(), [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    outputs = []
    if early is not None:
        early.prepare(ITERATION)
    for forward, x in zip(FORWARDS, inputs, strict=True):
        if early is not None:
            begin(early, forward)
        for _ in range(2):
            if early is None:
                x, _ = random.checkpoint(unit, False, x, None)
            else:
                x, _ = early.checkpoint(random.checkpoint, unit, False, x, None)
        outputs.append(x)
    if early is not None and ahead:
        torch.rand(3)  # whatever else draws meanwhile
        state = torch.get_rng_state()
        early.compute(RECOMPUTE)
        assert torch.equal(torch.get_rng_state(), state)
    for output in outputs:
        output.square().sum().backward()
    return unit, [*(x.grad for x in inputs), *(p.grad for p in unit.parameters()), *outputs]


def test_each_unit_is_recomputed_once():
    unit, _ = run(EarlyRecompute(), ahead=True)
    assert unit.calls == [False] * 4 + [True] * 4


@pytest.mark.parametrize("ahead", [True, False])
def test_the_last_unit_is_recomputed_first_early_or_not(ahead: bool):
    early, order = EarlyRecompute(), []
    early.prepare(ITERATION)
    begin(early, FORWARDS[0])
    x = torch.randn(2, 4, requires_grad=True)
    for number in range(2):

        def unit(x: torch.Tensor, number: int = number) -> torch.Tensor:
            if torch.is_grad_enabled():
                order.append(number)
            return x * 2

        x = early.checkpoint(random.checkpoint, unit, False, x)
    if ahead:
        early.compute(RECOMPUTE)
    x.sum().backward()
    assert order == [1, 0]
