"""The all-gather of parameters that a distributed optimizer leaves to the next forward."""

from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.passes.param_gather import add_param_gather
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.plan.verify import verify
from tests.plans import planned


def rows(plan: Plan) -> list[str]:
    verify(planned(plan))
    return plan.to_text().splitlines()


def test_a_stage_is_gathered_while_the_one_before_is_computed():
    plan = build("afab", num_ranks=1, num_segments=3, num_microbatches=2)
    assert rows(add_param_gather(plan)) == [
        "0ALL_GATHER 1ALL_GATHER 0F0 0F1 2ALL_GATHER 1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1 0B0 0B1"
    ]


def test_a_plan_that_gathers_is_left_as_it_is():
    plan = Plan.from_text("0ALL_GATHER 1ALL_GATHER 0F0 1F0 1B0 0B0")
    assert add_param_gather(plan) is plan


def test_others_are_gathered_in_the_place_of_replicated_stages():
    plan = build("afab", num_ranks=1, num_segments=4, num_microbatches=1)
    forwards = (row.split(" 3B0")[0] for row in rows(add_param_gather(plan, replicated={0, 2})))
    assert [*forwards] == ["1ALL_GATHER 3ALL_GATHER 0F0 1F0 2F0 3F0"]
    assert add_param_gather(plan, replicated=range(4)) == plan
