import pytest

from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError
from megatron.fold3d.plan.ops import STAGE_OPS

AIAO = """\
0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
"""


@pytest.mark.parametrize("op", Op)
def test_an_action_reads_back_from_its_text(op: Op):
    action = Action(12, op, None if op in STAGE_OPS else 345)
    assert Action.from_str(str(action)) == action


@pytest.mark.parametrize(
    "word",
    [
        "",
        "F",
        "0",
        "0F",
        "F0",
        "0f0",
        "0X0",
        "-1F0",
        "0F-1",
        "0F0 ",
        "0F0,",
        "0ALL_REDUCE1",
        "0SEND_F",
        "0F²",
        "٣F0",
        "0F" + 5000 * "9",
        "0RECV0",
    ],
)
def test_a_word_that_is_no_action_is_named(word: str):
    with pytest.raises(PlanError, match="is not an action; write <stage><op><microbatch>"):
        Action.from_str(word)


def test_a_long_word_is_shortened_in_the_message():
    with pytest.raises(PlanError) as caught:
        Action.from_str("x" * 1_000_000)
    assert len(str(caught.value)) < 350


def test_ranks_hold_the_same_number_of_segments():
    with pytest.raises(PlanError, match="3 stages on 2 ranks"):
        Plan.from_text("0F0 2F0\n1F0")


def test_select_keeps_the_order():
    forwards = Plan.from_text(AIAO).select({Op.FORWARD})
    assert forwards.to_text() == "0F0 0F1 2F0 2F1\n1F0 1F1 3F0 3F1\n"
