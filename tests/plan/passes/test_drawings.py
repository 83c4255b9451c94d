"""The rows of actions that the passes' docstrings draw are what the passes do."""

import re
from collections.abc import Callable
from types import ModuleType

import pytest

from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.passes import (
    grad_sync,
    offload,
    param_gather,
    recompute,
    stock_grad_sync,
    transfers,
    weight_grads,
)
from megatron.fold3d.plan.schedules import build

AFAB = build("afab", num_ranks=2, num_segments=1, num_microbatches=2)
AIAO = build("aiao", num_ranks=2, num_segments=2, num_microbatches=2, last_segment="afab")
ONE = build("aiao", num_ranks=2, num_segments=2, num_microbatches=1)


def drawings(module: ModuleType) -> list[tuple[list[str], list[str]]]:
    """The rows before and after each pass; rank 0 alone, or all ranks."""
    found: list[tuple[list[str], list[str]]] = []
    side: list[str] = []
    for line in (module.__doc__ or "").splitlines():
        if match := re.fullmatch(r" {4}(before|after|) +rank \d  (.*)", line):
            word, row = match.groups()
            if word == "before":
                found.append(([], []))
            if word:
                side = found[-1][word == "after"]
            side.append(row)
    return found


@pytest.mark.parametrize(
    ("module", "number", "before", "change"),
    [
        (transfers, 0, AFAB, transfers.add_p2p),
        (grad_sync, 0, AIAO, grad_sync.add_grad_sync),
        (
            *(grad_sync, 1, grad_sync.add_grad_sync(AIAO)),
            lambda plan: grad_sync.defer_grad_sync(plan, range(4)),
        ),
        (weight_grads, 0, AIAO, lambda plan: weight_grads.delay_weight_grads(plan, [0])),
        (offload, 0, AIAO, offload.add_offload),
        (param_gather, 0, ONE, param_gather.add_param_gather),
        (recompute, 0, AFAB, lambda plan: recompute.recompute_early(plan, range(2))),
        (stock_grad_sync, 0, AIAO, stock_grad_sync.serial_grad_sync),
        (stock_grad_sync, 1, AIAO, stock_grad_sync.aligned_grad_sync),
    ],
)
def test_a_pass_does_what_its_drawing_shows(
    module: ModuleType, number: int, before: Plan, change: Callable[[Plan], Plan]
):
    drawn_before, drawn_after = drawings(module)[number]
    assert drawn_before == before.to_text().splitlines()[: len(drawn_before)]
    assert drawn_after == change(before).to_text().splitlines()[: len(drawn_after)]
