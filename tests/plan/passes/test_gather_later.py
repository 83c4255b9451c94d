"""Gathers of parameters whose reduce-scatter ends behind forwards."""

from dataclasses import replace

import pytest

from megatron.fold3d.plan.compile import Options, lower
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.passes.gather_later import gather_later
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES, build
from megatron.fold3d.plan.verify import verify


def rows(plan: Plan) -> list[str]:
    verify(plan)
    return plan.to_text().splitlines()


SHARDED = Options(gathers_params=True, deferred_stages=range(3))


def test_what_is_gathered_has_been_stepped():
    plan = build("aiao", num_ranks=1, num_segments=2, num_microbatches=2, last_segment="afab")
    deferred = lower(plan, SHARDED)
    assert rows(deferred) == [
        "0WAIT_GRAD 0GATHER_PARAM 1WAIT_GRAD 1GATHER_PARAM 0WAIT_PARAM 0F0 0F1 "
        "1WAIT_PARAM 1F0 1F1 1B0 1B1 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD"
    ]
    wrong = deferred.to_text().replace("1WAIT_GRAD 1GATHER_PARAM", "1GATHER_PARAM 1WAIT_GRAD")
    with pytest.raises(PlanError, match="rank 0 waits at 1GATHER_PARAM for 1WAIT_GRAD"):
        verify(Plan.from_text(wrong))


def test_a_reduce_scatter_ends_behind_forwards_of_the_stage_before():
    plan = build("aiao", num_ranks=1, num_segments=3, num_microbatches=2, last_segment="afab")
    deferred = lower(plan, SHARDED)
    after = (
        "0WAIT_GRAD 0GATHER_PARAM 0WAIT_PARAM 0F0 1WAIT_GRAD 1GATHER_PARAM 0F1 1WAIT_PARAM 1F0 1F1 "
        "2WAIT_GRAD 2GATHER_PARAM 2WAIT_PARAM 2F0 2F1 2B0 2B1 2REDUCE_GRAD 1B0 1B1 1REDUCE_GRAD "
        "0B0 0B1 0REDUCE_GRAD"
    )
    # The first stage has none before it; stage 2 waits for all forwards of stage 1.
    moved = gather_later(deferred, {0: 1, 1: 1, 2: 2})
    assert rows(moved) == [after]
    assert lower(plan, replace(SHARDED, forwards_before_gather={1: 1, 2: 2})) == moved
    assert gather_later(moved, {}) == moved


def test_only_gathers_of_deferred_stages_move():
    plan = build("aiao", num_ranks=1, num_segments=2, num_microbatches=2)
    for options in (Options(gathers_params=True), Options(deferred_stages=range(2))):
        lowered = lower(plan, options)
        assert gather_later(lowered, {1: 1}) == lowered


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("forwards", [1, 3, 100])
def test_every_schedule_can_gather_later(schedule: str, forwards: int):
    segments = 1 if schedule in ONE_SEGMENT_SCHEDULES else 3
    plan = build(schedule, num_ranks=3, num_segments=segments, num_microbatches=6)
    deferred = Options(
        gathers_params=True,
        deferred_stages=range(9),
        forwards_before_gather=dict.fromkeys(range(9), forwards),
    )
    verify(lower(plan, deferred))
