"""DP.sync that reaches into the next iteration, as a plan."""

from megatron.fold3d.plan.compile import forward_only
from megatron.fold3d.plan.ir import Action, Op, Plan, carried
from megatron.fold3d.plan.passes.carried_grad_sync import carry_grad_sync, share_grad_sync
from megatron.fold3d.plan.verify import verify
from tests.plans import built, planned, rows

LOWERED = planned(built("aiao", 2, 2, 2))


def test_a_stage_steps_right_before_its_first_forward_behind_its_receive():
    assert rows(carry_grad_sync(LOWERED, range(4))) == [
        (
            "0STEP 0F0 0SEND_F0 2RECV_F0 0F1 0SEND_F1 2RECV_F1 2STEP 2F0 2SEND_F0 "
            "2RECV_B0 2F1 2SEND_F1 2RECV_B1 2B0 2SEND_B0 0RECV_B0 2B1 2SEND_B1 2REDUCE_KEPT "
            "2ALL_REDUCE 0RECV_B1 0B0 0B1 0REDUCE_KEPT 0ALL_REDUCE 2FINALIZE 0FINALIZE"
        ),
        (
            "1RECV_F0 1RECV_F1 1STEP 1F0 1SEND_F0 3RECV_F0 1F1 1SEND_F1 3RECV_F1 3STEP "
            "3F0 3B0 3SEND_B0 1RECV_B0 3F1 3B1 3SEND_B1 3REDUCE_KEPT 3ALL_REDUCE 1RECV_B1 "
            "1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_KEPT 1ALL_REDUCE 3FINALIZE 1FINALIZE"
        ),
    ]


def test_stages_that_are_kept_out_step_at_the_end():
    first, last = rows(carry_grad_sync(LOWERED, range(1, 3)))
    assert first.startswith("0F0 ")
    assert first.endswith(" 0B1 0ALL_REDUCE 2FINALIZE 0STEP")
    assert " 2STEP 2F0 " in first
    assert " 1STEP 1F0 " in last
    assert last.endswith(" 1SEND_B1 1REDUCE_KEPT 1ALL_REDUCE 1FINALIZE 3STEP")


def test_carrying_twice_or_nothing_changes_nothing():
    twice = carry_grad_sync(LOWERED, range(4))
    assert carry_grad_sync(twice, range(4)) == twice
    assert carry_grad_sync(LOWERED, range(0)) == LOWERED
    forwards = planned(forward_only(LOWERED))  # evaluation steps nothing
    assert carry_grad_sync(forwards, range(4)) == forwards


def test_a_plan_tells_which_of_its_stages_are_carried_and_whether_a_step_is_not():
    some = carry_grad_sync(LOWERED, range(1, 3))
    found = [carried(program) for program in some.programs]
    assert found == [{2: 6}, {1: 2}]
    assert some.programs[0][6] == Action(2, Op.STEP)
    assert some.programs[1][2] == Action(1, Op.STEP)
    assert [carried(program) for program in LOWERED.programs] == [{}, {}]
    every = carry_grad_sync(LOWERED, range(4))
    assert [plan.flushes for plan in (LOWERED, some, every)] == [True, True, False]


def test_what_is_left_of_a_sum_starts_in_the_order_in_which_forwards_need_it():
    order = built("afab", 1, 3, 1)
    every = carry_grad_sync(planned(order), range(3))
    assert rows(share_grad_sync(every, (0.0, 0.25, 0.5))) == [
        "1ALL_REDUCE 2ALL_REDUCE 0STEP 0F0 1STEP 1F0 2STEP 2F0 2B0 2REDUCE_KEPT 2ALL_REDUCE:500 "
        "1B0 1REDUCE_KEPT 1ALL_REDUCE:250 0B0 0REDUCE_KEPT 0ALL_REDUCE 2FINALIZE 1FINALIZE "
        "0FINALIZE"
    ]
    assert share_grad_sync(every, (1.0, 1.0, 1.0)) == every
    # Stage 0 steps at the end. What is left of the others starts when that step is done.
    some = carry_grad_sync(planned(order), range(1, 3))
    assert rows(share_grad_sync(some, (0.0, 0.0, 0.5))) == [
        "1ALL_REDUCE 2ALL_REDUCE 0F0 1STEP 1F0 2STEP 2F0 2B0 2REDUCE_KEPT 2ALL_REDUCE:500 "
        "1B0 1REDUCE_KEPT 0B0 0ALL_REDUCE 2FINALIZE 1FINALIZE 0STEP"
    ]
    first = carry_grad_sync(planned(order), range(1))
    assert rows(share_grad_sync(first, (0.0,) * 3)) == [
        "0STEP 0F0 1F0 2F0 2B0 2ALL_REDUCE 1B0 1ALL_REDUCE 0B0 0REDUCE_KEPT 0ALL_REDUCE 0FINALIZE "
        "2STEP 1STEP"
    ]
    # Behind the all-gather of the stage before
    gathered = planned(order, "step=next", gathers_params=True)
    assert rows(share_grad_sync(gathered, (0.0, 0.6, 0.6))) == [
        "0STEP 0ALL_GATHER 1REDUCE_SCATTER 1STEP 1ALL_GATHER 2REDUCE_SCATTER 0F0 2STEP 2ALL_GATHER "
        "1F0 2F0 2B0 2REDUCE_KEPT 2REDUCE_SCATTER:600 1B0 1REDUCE_KEPT 1REDUCE_SCATTER:600 0B0 "
        "0REDUCE_KEPT 0REDUCE_SCATTER 2FINALIZE 1FINALIZE 0FINALIZE"
    ]


def test_a_share_ends_where_all_gradients_are_complete():
    # Behind 0W:500 perhaps less than 380 thousandths are, and no later part would start the others.
    plan = Plan.from_text(
        "0STEP 0F0 0B0 0W:250 0ALL_REDUCE:250 0W:500 0ALL_REDUCE:500 0W:1000 0REDUCE_KEPT "
        "0ALL_REDUCE 0FINALIZE"
    )
    for share, parts in (
        (0.38, ("250", "379", "380")),
        (0.25, ("249", "249", "250")),
        (0.001, ("", "", "1")),
        (1.0, ("250", "500", "")),
    ):
        shared = share_grad_sync(plan, (share,))
        words = [str(a) for a in shared.programs[0] if a.op is Op.ALL_REDUCE]
        wanted = list(dict.fromkeys(f"0ALL_REDUCE:{end}" for end in parts if end))
        assert words == [*wanted, "0ALL_REDUCE"]
        verify(shared)
