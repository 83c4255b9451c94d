import pytest

from megatron.fold3d.plan.files import from_csv, to_csv
from megatron.fold3d.plan.ir import Action, Op, Plan, PlanError
from megatron.fold3d.plan.ops import P2P_OPS, STAGE_OPS

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


def test_a_plan_knows_its_sizes():
    plan = Plan.from_text(AIAO)
    assert (plan.num_ranks, plan.num_segments) == (2, 2)
    assert (plan.num_stages, plan.num_microbatches) == (4, 2)
    assert not plan.has(*P2P_OPS)


def test_text_is_one_line_per_rank():
    assert Plan.from_text(AIAO).to_text() == AIAO


def test_csv_is_one_row_per_rank():
    plan = Plan.from_text(AIAO)
    assert to_csv(plan) == AIAO.replace(" ", ",")
    assert from_csv(to_csv(plan)) == plan


def test_blank_lines_and_comments_are_skipped():
    first, second = AIAO.splitlines()
    text = f"# rank 0, and a comma\n{first}\n\n   \n# rank 1\n  {second}  \n"
    assert Plan.from_text(text) == Plan.from_text(AIAO)


def test_empty_cells_of_a_table_are_idle_time():
    table = """\
0F0,0F1,   ,   ,0B0,0B1
   ,1F0,1B0,1F1,1B1,
"""
    assert from_csv(table) == Plan.from_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")


def test_a_wrong_word_is_reported_with_its_rank():
    with pytest.raises(PlanError, match="rank 1: '1G0' is not an action"):
        Plan.from_text("0F0 0B0\n1G0 1B0")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing but a comment\n"])
def test_an_empty_plan_is_refused(text: str):
    with pytest.raises(PlanError, match="at least one rank and one action"):
        Plan.from_text(text)


def test_ranks_hold_the_same_number_of_segments():
    with pytest.raises(PlanError, match="3 stages on 2 ranks"):
        Plan.from_text("0F0 2F0\n1F0")


def test_select_keeps_the_order():
    forwards = Plan.from_text(AIAO).select({Op.FORWARD})
    assert forwards.to_text() == "0F0 0F1 2F0 2F1\n1F0 1F1 3F0 3F1\n"
