"""Weight gradients that are computed when all backwards are through, as a plan."""

import pytest

from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from tests.plans import built

AIAO = built("aiao", 2, 3, 2)


def test_without_segments_nothing_changes():
    assert delay_weight_grads(AIAO, []) == AIAO


def test_a_segment_that_is_not_there_is_named():
    with pytest.raises(PlanError, match=r"no segment 3 .* the plan has segments 0 to 2"):
        delay_weight_grads(AIAO, [0, 3])


def test_what_a_weight_gradient_reads_stays_on_the_device():
    assert peak_activations(Plan.from_text("0F0 0B0 0F1 0B1")) == (1,)
    assert peak_activations(Plan.from_text("0F0 0B0 0F1 0B1 0W0 0W1")) == (2,)
