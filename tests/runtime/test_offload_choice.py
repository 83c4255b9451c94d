"""``auto`` moves as little as memory allows, and nothing that compute could not hide."""

from dataclasses import replace

import pytest

from megatron.fold3d.plan.lowering import add_offload
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.plan.verify import peak_activations
from megatron.fold3d.runtime.offload_choice import Measured, choose

PLAN = build("afab", num_ranks=1, num_segments=1, num_microbatches=20)
PROGRAM = PLAN.programs[0]
MEASURED = Measured(
    activation_bytes=100,
    spare_bytes=0,
    forward_s=1.0,
    backward_s=2.0,
    offload_s=0.5,
    reload_s=0.5,
)


@pytest.mark.parametrize("spare", [0, 3, 10, 16])
def test_memory_that_is_left_over_is_used(spare: int):
    measured = replace(MEASURED, spare_bytes=spare * 112)  # 112: a tenth is left alone
    leave = choose(PROGRAM, measured)
    everything = peak_activations(add_offload(PLAN))[0]

    assert peak_activations(add_offload(PLAN, at_most=leave))[0] <= everything + spare
    if leave:
        assert peak_activations(add_offload(PLAN, at_most=leave - 1))[0] > everything + spare


def test_nothing_leaves_where_all_fits():
    assert choose(PROGRAM, replace(MEASURED, spare_bytes=20 * 112)) == 0
    assert choose(PROGRAM, replace(MEASURED, spare_bytes=None)) == 0


def test_copies_that_take_longer_than_compute_are_not_begun(caplog: pytest.LogCaptureFixture):
    slow = replace(MEASURED, offload_s=2.0)
    assert choose(PROGRAM, slow) == 10
    assert "memory wants 19 activations to leave, compute hides the copies of 10" in caplog.text
    assert choose(PROGRAM, replace(MEASURED, reload_s=8.0)) == 5
