import pytest

from megatron.fold3d.plan.compile import forward_only
from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError, Program
from megatron.fold3d.plan.ops import COMPUTE_OPS, RECV_OPS
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync
from megatron.fold3d.plan.passes.offload import add_offload
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.plan.verify import verify
from tests.plans import built, planned, rows


def test_a_receive_is_posted_before_the_computation_that_precedes_its_use():
    assert rows(add_p2p(built("1f1b", 2, 1, 3))) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_receives_further_ahead_stand_before_an_earlier_computation():
    order = built("aiao", 2, 2, 4)
    one, three = (add_p2p(order, receives_ahead=count) for count in (1, 3))
    verify(three)
    for near, far in zip(one.programs, three.programs, strict=True):
        assert _computations_before(far) == {
            receive: max(0, count - 2) for receive, count in _computations_before(near).items()
        }
        sent = [a for a in near if a.op in RECV_OPS]
        assert [a for a in far if a.op in RECV_OPS] == sent  # in the same order
        assert [a for a in far if a.op not in RECV_OPS] == [a for a in near if a not in sent]


def test_the_last_rank_hands_a_segment_back_to_the_first():
    assert rows(add_p2p(built("aiao", 2, 2, 2))) == [
        (
            "0F0 0SEND_F0 2RECV_F0 0F1 0SEND_F1 2RECV_F1 2F0 2SEND_F0 2RECV_B0 2F1 2SEND_F1 "
            "2RECV_B1 2B0 2SEND_B0 0RECV_B0 2B1 2SEND_B1 0RECV_B1 0B0 0B1"
        ),
        (
            "1RECV_F0 1RECV_F1 1F0 1SEND_F0 3RECV_F0 1F1 1SEND_F1 3RECV_F1 3F0 3B0 3SEND_B0 "
            "1RECV_B0 3F1 3B1 3SEND_B1 1RECV_B1 1B0 1SEND_B0 1B1 1SEND_B1"
        ),
    ]


@pytest.mark.parametrize("plan", [built("aiao", 1, 3, 2), add_p2p(built("interleaved", 4, 2, 8))])
def test_a_plan_of_one_rank_or_with_its_transfers_gets_no_others(plan: Plan):
    assert add_p2p(plan) == plan


def test_weight_gradients_may_come_any_time_after_their_backward():
    # Rank 0 runs 0B0 after 1W0: what 1W0 does must not take 1B0's result away.
    plan = Plan.from_text("""\
        0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2
        1F0 1B0 1W0 1F1 1B1 1F2 1B2 1W1 1W2
    """)
    assert rows(add_p2p(plan)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0F2 0SEND_F2 0B0 0RECV_B1 0W0 0B1 0RECV_B2 0W1 0B2 0W2",
        "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1B0 1SEND_B0 1W0 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2 1W1 1W2",
    ]


def test_transfers_leave_other_actions_behind_their_computation():
    plan = Plan.from_text("""\
        0ALL_GATHER 0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0B1 0REDUCE_SCATTER 0STEP
        1ALL_GATHER 1F0 1B0 1F1 1B1 1REDUCE_SCATTER 1STEP
    """)
    assert rows(add_p2p(plan)) == [
        (
            "0ALL_GATHER 0F0 0SEND_F0 0OFFLOAD0 0RECV_B0 0F1 0SEND_F1 0RELOAD0 "
            "0RECV_B1 0B0 0B1 0REDUCE_SCATTER 0STEP"
        ),
        ("1RECV_F0 1ALL_GATHER 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_SCATTER 1STEP"),
    ]


def test_an_order_that_cannot_run_is_refused_with_where_each_rank_stands():
    swapped = Plan.from_text("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1")
    with pytest.raises(PlanError, match="no rank can go on: rank 0 at 0B0, rank 1 at 1F1"):
        add_p2p(swapped)


def test_lower_adds_what_lacks_and_nothing_twice():
    plan = built("aiao", 2, 2, 3)
    lowered = planned(plan)
    assert lowered == add_grad_sync(add_p2p(plan))
    assert planned(add_p2p(plan)) == planned(lowered) == lowered


def test_offload_spares_what_comes_back_within_two_computations():
    assert rows(add_offload(built("1f1b", 1, 1, 2))) == ["0F0 0B0 0F1 0B1"]
    assert rows(add_offload(built("afab", 1, 1, 3))) == [
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0F2 0OFFLOAD2 0RELOAD1 0B0 0RELOAD2 0B1 0B2"
    ]


def test_offload_leaves_when_its_output_has_been_sent():
    plan = Plan.from_text("0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2")
    first = add_p2p(plan).programs[0]
    assert [str(a) for a in add_offload(Plan((first,))).programs[0]][:6] == (
        ["0F0", "0SEND_F0", "0OFFLOAD0", "0F1", "0SEND_F1", "0OFFLOAD1"]
    )
    assert planned(add_offload(plan)) == add_grad_sync(add_p2p(add_offload(plan)))


def test_offload_comes_back_earlier_over_slow_copies():
    assert rows(add_offload(built("afab", 1, 1, 5), depth=2)) == [
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0RELOAD0 0F3 0OFFLOAD3 0RELOAD1 0F4 0OFFLOAD4 "
        "0RELOAD2 0B0 0RELOAD3 0B1 0RELOAD4 0B2 0B3 0B4"
    ]
    # What began to leave two computations ago has left when the first one comes back.
    assert rows(add_offload(built("afab", 1, 1, 4), depth=2)) == ["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"]


def test_offload_of_a_few_takes_the_longest_away_and_spreads_them():
    assert rows(add_offload(built("afab", 1, 1, 6), at_most=2)) == [
        "0F0 0OFFLOAD0 0F1 0F2 0F3 0OFFLOAD3 0F4 0RELOAD0 0F5 0B0 0B1 0RELOAD3 0B2 0B3 0B4 0B5"
    ]
    lowered = add_offload(built("afab", 1, 2, 3), at_most=4)
    assert [str(a) for a in lowered.programs[0] if a.op is Op.OFFLOAD] == [
        *("0OFFLOAD0", "0OFFLOAD1", "0OFFLOAD2", "1OFFLOAD0")
    ]
    assert add_offload(built("afab", 1, 2, 3), at_most=0) == built("afab", 1, 2, 3)


def test_evaluation_runs_the_forwards():
    assert forward_only(built("1f1b", 2, 1, 3)).to_text() == "0F0 0F1 0F2\n1F0 1F1 1F2\n"
    assert rows(add_p2p(forward_only(built("1f1b", 2, 1, 2)))) == [
        "0F0 0SEND_F0 0F1 0SEND_F1",
        "1RECV_F0 1RECV_F1 1F0 1F1",
    ]


def _computations_before(program: Program) -> dict[Action, int]:
    """Return how many computations stand before each receive."""
    before: dict[Action, int] = {}
    count = 0
    for action in program:
        if action.op in RECV_OPS:
            before[action] = count
        count += action.op in COMPUTE_OPS
    return before
