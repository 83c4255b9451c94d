"""The rows of actions that the passes' docstrings draw are what the passes do."""

import re
from types import ModuleType

import pytest

from megatron.fold3d.plan.compile import forward_only
from megatron.fold3d.plan.passes import (
    carried_grad_sync,
    early_grad_sync,
    grad_sync,
    offload,
    param_gather,
    place_weight_grads,
    recompute,
    shard_grads,
    shard_params,
    sliced_grad_sync,
    transfers,
    weight_grads,
)
from tests.plans import built

AFAB = built("afab", 2, 1, 2)
AIAO = built("afab", 2, 2, 2)
THREE = built("aiao", 2, 3, 1)
DELAYED = weight_grads.delay_weight_grads(built("afab", 1, 1, 2), [0])
CARRIED = carried_grad_sync.carry_grad_sync(grad_sync.add_grad_sync(AIAO), range(4))
TRIANGLE = built("1f1b", 3, 1, 5)
EQUAL = (1.0,) * 3
TIMES = place_weight_grads.StageTimes(forward_s=EQUAL, backward_s=EQUAL, weight_s=EQUAL)
ONE = built("aiao", 2, 2, 1)
SCATTERED = grad_sync.add_grad_sync(ONE, range(4))
FORWARDS = forward_only(built("aiao", 2, 2, 3))


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
        elif side and (more := re.fullmatch(r" {20}(\S.*)", line)):
            side[-1] += f" {more[1]}"
    return found


@pytest.mark.parametrize(
    ("module", "number", "before", "change"),
    [
        (transfers, 0, AFAB, transfers.add_p2p),
        (transfers, 1, FORWARDS, lambda plan: transfers.add_p2p(plan, receives_late=True)),
        (grad_sync, 0, AIAO, grad_sync.add_grad_sync),
        (
            *(carried_grad_sync, 0, grad_sync.add_grad_sync(AIAO)),
            lambda plan: carried_grad_sync.carry_grad_sync(plan, range(4)),
        ),
        (
            carried_grad_sync,
            1,
            CARRIED,
            lambda plan: carried_grad_sync.share_grad_sync(plan, (0.0, 0.0, 0.5, 0.5)),
        ),
        (
            *(early_grad_sync, 0, grad_sync.add_grad_sync(DELAYED)),
            lambda plan: early_grad_sync.reduce_early(plan, range(1)),
        ),
        (weight_grads, 0, AIAO, lambda plan: weight_grads.delay_weight_grads(plan, [0])),
        (weight_grads, 1, AIAO, lambda plan: weight_grads.delay_weight_grads(plan, [1], [1])),
        (
            *(place_weight_grads, 0, TRIANGLE),
            lambda plan: place_weight_grads.place_weight_grads(plan, TIMES),
        ),
        (offload, 0, AIAO, offload.add_offload),
        (param_gather, 0, ONE, param_gather.add_param_gather),
        (shard_params, 0, THREE, shard_params.shard_params),
        (shard_grads, 0, grad_sync.add_grad_sync(THREE, range(6)), shard_grads.shard_grads),
        (
            *(shard_grads, 1, carried_grad_sync.carry_grad_sync(SCATTERED, range(4))),
            shard_grads.shard_grads,
        ),
        (recompute, 0, AFAB, lambda plan: recompute.recompute_early(plan, range(2))),
        (
            *(sliced_grad_sync, 0, grad_sync.add_grad_sync(AIAO)),
            lambda plan: sliced_grad_sync.slice_grad_sync(plan, ()),
        ),
        (
            *(sliced_grad_sync, 1, CARRIED),
            lambda plan: sliced_grad_sync.slice_grad_sync(plan, (0.5,) * 4),
        ),
        (grad_sync, 1, AIAO, grad_sync.serial_grad_sync),
        (grad_sync, 2, AIAO, grad_sync.aligned_grad_sync),
    ],
)
def test_a_pass_does_what_its_drawing_shows(module, number, before, change):
    drawn_before, drawn_after = drawings(module)[number]
    for drawn, plan in ((drawn_before, before), (drawn_after, change(before))):
        assert drawn
        for row, found in zip(drawn, plan.to_text().splitlines(), strict=False):
            begins = row.removesuffix("...")
            assert found.startswith(begins) if begins != row else found == row
