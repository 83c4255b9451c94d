"""DP.sync that reaches into the next iteration, as a plan."""

import pytest

from megatron.fold3d.plan.compile import forward_only, lower
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.passes.grad_sync import defer_grad_sync, deferred_stages
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.plan.verify import verify

LOWERED = lower(build("aiao", num_ranks=2, num_segments=2, num_microbatches=2))


def rows(plan: Plan) -> list[str]:
    verify(plan)
    return plan.to_text().splitlines()


def test_a_stage_waits_right_before_its_first_forward_behind_its_receive():
    assert rows(defer_grad_sync(LOWERED, range(4))) == [
        (
            "0WAIT_GRAD 0F0 0SEND_F0 2RECV_F0 0F1 0SEND_F1 2RECV_F1 2WAIT_GRAD 2F0 2SEND_F0 "
            "2RECV_B0 2F1 2SEND_F1 2RECV_B1 2B0 2SEND_B0 0RECV_B0 2B1 2SEND_B1 2REDUCE_GRAD "
            "0RECV_B1 0B0 0B1 0REDUCE_GRAD"
        ),
        (
            "1RECV_F0 1RECV_F1 1WAIT_GRAD 1F0 1SEND_F0 3RECV_F0 1F1 1SEND_F1 3RECV_F1 3WAIT_GRAD "
            "3F0 3B0 3SEND_B0 1RECV_B0 3F1 3B1 3SEND_B1 3REDUCE_GRAD 1RECV_B1 1B0 1SEND_B0 "
            "1B1 1SEND_B1 1REDUCE_GRAD"
        ),
    ]


def test_stages_that_are_kept_out_wait_at_the_end():
    first, last = rows(defer_grad_sync(LOWERED, range(1, 3)))
    assert first.startswith("0F0 ")
    assert first.endswith(" 0REDUCE_GRAD 0WAIT_GRAD")
    assert " 2WAIT_GRAD 2F0 " in first
    assert " 1WAIT_GRAD 1F0 " in last
    assert last.endswith(" 1REDUCE_GRAD 3WAIT_GRAD")


def test_deferring_twice_or_nothing_changes_nothing():
    deferred = defer_grad_sync(LOWERED, range(4))
    assert defer_grad_sync(deferred, range(4)) == deferred
    assert defer_grad_sync(LOWERED, range(0)) == LOWERED


def test_evaluation_waits_for_no_gradients():
    forwards = lower(forward_only(LOWERED))
    assert defer_grad_sync(forwards, range(4)) == forwards


def test_a_program_tells_which_of_its_stages_are_deferred():
    programs = defer_grad_sync(LOWERED, range(1, 3)).programs
    assert [deferred_stages(program) for program in programs] == [{2}, {1}]
    assert [deferred_stages(program) for program in LOWERED.programs] == [set(), set()]


@pytest.mark.parametrize("order", ["0F0 0WAIT_GRAD 0F1 0B0 0B1", "0F0 0F1 0B0 0WAIT_GRAD 0B1"])
def test_gradients_are_not_waited_for_in_between(order: str):
    with pytest.raises(PlanError, match="rank 0 waits at 0WAIT_GRAD for 0REDUCE_GRAD"):
        verify(Plan.from_text(f"{order} 0REDUCE_GRAD"))


def test_a_deferred_reduction_must_be_started_in_the_plan():
    with pytest.raises(PlanError, match="0REDUCE_GRAD is missing"):
        verify(Plan.from_text("0WAIT_GRAD 0F0 0B0"))
