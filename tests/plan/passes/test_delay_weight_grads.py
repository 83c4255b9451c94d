"""Weight gradients that are computed when all backwards are through, as a plan."""

import pytest

from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.plan.verify import verify
from tests.plans import planned

AIAO = build("aiao", num_ranks=2, num_segments=3, num_microbatches=2)


def rows(plan: Plan) -> list[str]:
    verify(plan)
    return plan.to_text().splitlines()


def test_delayed_weight_grads_follow_the_last_backward_and_hide_its_sync():
    first, last = rows(planned(delay_weight_grads(AIAO, [1])))
    assert first.endswith(" 0B0 0B1 0ALL_REDUCE 2W0 2W1 2ALL_REDUCE 4STEP 0STEP 2STEP")
    assert last.endswith(" 1B1 1SEND_B1 1ALL_REDUCE 3W0 3W1 3ALL_REDUCE 5STEP 1STEP 3STEP")


def test_the_segment_that_is_needed_first_comes_first():
    (program,) = delay_weight_grads(
        build("aiao", num_ranks=1, num_segments=3, num_microbatches=1), [2, 1]
    ).programs
    assert program[-2:] == (Action(1, Op.WEIGHT, 0), Action(2, Op.WEIGHT, 0))


def test_without_segments_nothing_changes():
    assert delay_weight_grads(AIAO, []) == AIAO


def test_a_segment_that_is_not_there_is_named():
    with pytest.raises(PlanError, match=r"no segment 3 .* the plan has segments 0 to 2"):
        delay_weight_grads(AIAO, [0, 3])


def test_what_a_weight_gradient_reads_stays_on_the_device():
    assert peak_activations(Plan.from_text("0F0 0B0 0F1 0B1")) == (1,)
    assert peak_activations(Plan.from_text("0F0 0B0 0F1 0B1 0W0 0W1")) == (2,)
