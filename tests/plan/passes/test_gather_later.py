"""Gathers of parameters whose reduce-scatter ends behind forwards."""

from typing import Any

import pytest

from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.passes.gather_later import gather_later
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES, build
from megatron.fold3d.plan.verify import verify
from tests.plans import planned


def rows(plan: Plan) -> list[str]:
    verify(plan)
    return plan.to_text().splitlines()


SHARDED: dict[str, Any] = {"parts": "step=next", "gathers_params": True}


def test_what_is_gathered_has_been_stepped():
    plan = build("afab", num_ranks=1, num_segments=2, num_microbatches=2)
    carried = planned(plan, **SHARDED)
    assert rows(carried) == [
        "0STEP 0ALL_GATHER 1STEP 1ALL_GATHER 0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE_KEPT 1REDUCE_SCATTER "
        "0B0 0B1 0REDUCE_KEPT 0REDUCE_SCATTER 1FINALIZE 0FINALIZE"
    ]
    wrong = carried.to_text().replace("1STEP 1ALL_GATHER", "1ALL_GATHER 1STEP")
    with pytest.raises(PlanError, match="rank 0 waits at 1ALL_GATHER for 1STEP"):
        verify(Plan.from_text(wrong))


def test_a_reduce_scatter_ends_behind_forwards_of_the_stage_before():
    plan = build("afab", num_ranks=1, num_segments=3, num_microbatches=2)
    carried = planned(plan, **SHARDED)
    after = (
        "0STEP 0ALL_GATHER 0F0 1STEP 1ALL_GATHER 0F1 1F0 1F1 2STEP 2ALL_GATHER 2F0 2F1 "
        "2B0 2B1 2REDUCE_KEPT 2REDUCE_SCATTER 1B0 1B1 1REDUCE_KEPT 1REDUCE_SCATTER "
        "0B0 0B1 0REDUCE_KEPT 0REDUCE_SCATTER 2FINALIZE 1FINALIZE 0FINALIZE"
    )
    # The first stage has none before it; stage 2 waits for all forwards of stage 1.
    moved = gather_later(carried, {0: 1, 1: 1, 2: 2})
    assert rows(moved) == [after]
    assert planned(plan, **SHARDED, forwards_before_gather={1: 1, 2: 2}) == moved
    assert gather_later(moved, {}) == moved


def test_only_gathers_of_carried_stages_move():
    plan = build("aiao", num_ranks=1, num_segments=2, num_microbatches=2)
    for lowered in (planned(plan, gathers_params=True), planned(plan, "step=next")):
        assert gather_later(lowered, {1: 1}) == lowered


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("forwards", [1, 3, 100])
def test_every_schedule_can_gather_later(schedule: str, forwards: int):
    segments = 1 if schedule in ONE_SEGMENT_SCHEDULES else 3
    plan = build(schedule, num_ranks=3, num_segments=segments, num_microbatches=6)
    verify(planned(plan, **SHARDED, forwards_before_gather=dict.fromkeys(range(9), forwards)))
