"""Weight gradients that are computed when all backwards are through, as a plan."""

import pytest

from megatron.fold3d.plan.compile import lower
from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.passes.carried_grad_sync import carry_grad_sync
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads, split_stages
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES, SPLIT_SCHEDULES, build
from megatron.fold3d.plan.verify import verify

AIAO = build("aiao", num_ranks=2, num_segments=3, num_microbatches=2)


def rows(plan: Plan) -> list[str]:
    verify(plan)
    return plan.to_text().splitlines()


def test_delayed_weight_grads_follow_the_last_backward_and_hide_its_sync():
    first, last = rows(lower(delay_weight_grads(AIAO, [1])))
    assert first.endswith(" 0B0 0B1 0ALL_REDUCE 2W0 2W1 2ALL_REDUCE 4STEP 0STEP 2STEP")
    assert last.endswith(" 1B1 1SEND_B1 1ALL_REDUCE 3W0 3W1 3ALL_REDUCE 5STEP 1STEP 3STEP")


def test_the_segment_that_is_needed_first_comes_first():
    (program,) = delay_weight_grads(
        build("aiao", num_ranks=1, num_segments=3, num_microbatches=1), [2, 1]
    ).programs
    assert program[-2:] == (Action(1, Op.WEIGHT, 0), Action(2, Op.WEIGHT, 0))


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in SPLIT_SCHEDULES])
def test_every_schedule_can_delay_weight_grads_and_defer_their_sync(schedule: str):
    segments = 1 if schedule in ONE_SEGMENT_SCHEDULES else 3
    plan = build(schedule, num_ranks=3, num_segments=segments, num_microbatches=6)
    plan = lower(delay_weight_grads(plan, range(segments)))
    verify(carry_grad_sync(plan, range(plan.num_stages)))
    assert [len(split_stages(program)) for program in plan.programs] == [segments] * 3


def test_without_segments_nothing_changes():
    assert delay_weight_grads(AIAO, []) == AIAO


def test_a_segment_that_is_not_there_is_named():
    with pytest.raises(PlanError, match=r"no segment 3 .* the plan has segments 0 to 2"):
        delay_weight_grads(AIAO, [0, 3])


@pytest.mark.parametrize("missing", ["2W0", "2W1", "5B1"])
def test_a_computation_that_is_missing_is_named(missing: str):
    programs = delay_weight_grads(AIAO, [1]).programs
    gone = Action.from_str(missing)
    plan = Plan(tuple(tuple(a for a in program if a != gone) for program in programs))
    with pytest.raises(PlanError, match=f"{missing} is missing"):
        verify(plan)


def test_gradients_are_not_reduced_before_their_weight_gradients():
    early = Plan.from_text("0F0 0B0 0ALL_REDUCE 0W0 0STEP")
    with pytest.raises(PlanError, match=r"0ALL_REDUCE needs 0W0|waits at 0ALL_REDUCE for 0W0"):
        verify(early)
    verify(add_grad_sync(Plan.from_text("0F0 0B0 0W0")))


def test_what_a_weight_gradient_reads_stays_on_the_device():
    assert peak_activations(Plan.from_text("0F0 0B0 0F1 0B1")) == (1,)
    assert peak_activations(Plan.from_text("0F0 0B0 0F1 0B1 0W0 0W1")) == (2,)
