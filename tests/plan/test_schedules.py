import pytest

from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES, SPLIT_SCHEDULES
from tests import plans


def rows(*sizes, **options) -> list[str]:
    return plans.rows(plans.built(*sizes, **options))


def test_1f1b_runs_one_forward_less_ahead_per_rank():
    assert rows("1f1b", 4, 1, 5) == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4",
    ]


def test_shifted_critical_path_runs_the_third_forward_of_the_last_rank_but_one_first():
    assert rows("shifted-critical-path", 4, 1, 5) == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4",
        "2F0 2F1 2F2 2B0 2B1 2F3 2B2 2F4 2B3 2B4",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4",
    ]
    assert rows("shifted-critical-path", 2, 1, 4) == [
        "0F0 0F1 0F2 0B0 0B1 0F3 0B2 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_shifted_critical_path_is_1f1b_without_a_third_forward(microbatches: int):
    one_f_one_b = rows("1f1b", 4, 1, microbatches)
    assert rows("shifted-critical-path", 4, 1, microbatches) == one_f_one_b


def test_zb_h1_delays_the_weight_gradients_of_as_many_micro_batches_as_ranks_are_before():
    assert rows("zb-h1", 4, 1, 8) == plans.ZB_H1


def test_zb_h2_runs_twice_as_far_ahead_and_delays_twice_as_many():
    assert rows("zb-h2", 3, 1, 6) == [
        "0F0 0F1 0F2 0F3 0F4 0B0 0W0 0F5 0B1 0W1 0B2 0W2 0B3 0W3 0B4 0W4 0B5 0W5",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1W0 1F5 1B3 1W1 1B4 1W2 1B5 1W3 1W4 1W5",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2W0 2F5 2B5 2W1 2W2 2W3 2W4 2W5",
    ]


@pytest.mark.parametrize("schedule", sorted(SPLIT_SCHEDULES))
def test_zero_bubble_with_fewer_micro_batches_than_ranks(schedule: str):
    assert rows(schedule, 4, 1, 2) == [
        "0F0 0F1 0B0 0W0 0B1 0W1",
        "1F0 1F1 1B0 1B1 1W0 1W1",
        "2F0 2F1 2B0 2B1 2W0 2W1",
        "3F0 3B0 3F1 3B1 3W0 3W1",
    ]


def test_forwards_ahead_counts_for_each_rank_behind():
    classic, looped = rows("1f1b", 4, 1, 8), rows("interleaved", 4, 1, 8)
    assert rows("1f1b", 4, 1, 8, forwards_ahead=1) == classic
    assert rows("1f1b", 4, 1, 8, forwards_ahead=2) == looped
    assert rows("1f1b", 4, 1, 8, forwards_ahead=3)[1:3] == [
        "1F0 1F1 1F2 1F3 1F4 1F5 1F6 1B0 1F7 1B1 1B2 1B3 1B4 1B5 1B6 1B7",
        "2F0 2F1 2F2 2F3 2B0 2F4 2B1 2F5 2B2 2F6 2B3 2F7 2B4 2B5 2B6 2B7",
    ]


def test_forwards_ahead_is_of_the_last_segment_of_aiao():
    assert rows("aiao", 2, 2, 3, forwards_ahead=2) == rows("aiao", 2, 2, 3)
    assert rows("aiao", 2, 2, 3, forwards_ahead=99) == [
        rows("afab", 2, 2, 3)[0],
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2",
    ]
    assert rows("aiao", 2, 2, 3, forwards_ahead=1)[0] == (
        "0F0 0F1 0F2 2F0 2F1 2B0 2F2 2B1 2B2 0B0 0B1 0B2"
    )


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("afab", {"forwards_ahead": 2}, "2 with --schedule afab: only .*interleaved read it; drop"),
        ("1f1b", {"forwards_ahead": 0}, "0: a rank runs at least one .*; the default is 1"),
        ("aiao", {"forwards_ahead": -2}, "-2: a rank runs at least one .*; the default is 2"),
    ],
)
def test_what_cannot_run_ahead_is_refused(schedule: str, options: dict, message: str):
    with pytest.raises(PlanError, match=f"^ahead={message}"):
        rows(schedule, 2, 1, 4, **options)


def test_interleaved_with_groups_of_three_and_a_last_group_of_two():
    assert rows("interleaved", 2, 2, 5, group_size=3) == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4",
    ]


def test_a_last_group_smaller_than_the_pipeline_is_shared_by_the_others():
    # Groups of 2 would leave one micro-batch to a third: the groups are 0 1 and 2 3 4, and the
    # last rank runs three forwards ahead, as many as the larger group has.
    assert rows("interleaved", 2, 2, 5) == [
        "0F0 0F1 2F0 2F1 0F2 0F3 2B0 0F4 2B1 2F2 0B0 2F3 0B1 2F4 2B2 2B3 2B4 0B2 0B3 0B4",
        "1F0 1F1 3F0 3F1 3B0 1F2 3B1 1F3 1B0 1F4 1B1 3F2 3B2 3F3 3B3 3F4 3B4 1B2 1B3 1B4",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_the_smallest_plan(schedule: str):
    assert rows(schedule, 1, 1, 1) == ["0F0 0B0" + " 0W0" * (schedule in SPLIT_SCHEDULES)]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-2, 1, 1)])
def test_a_size_below_one_is_refused(sizes: tuple[int, int, int]):
    with pytest.raises(PlanError, match=rf"found {min(sizes)} .*; a plan needs at least one"):
        rows("aiao", *sizes)


@pytest.mark.parametrize("schedule", sorted(ONE_SEGMENT_SCHEDULES))
def test_a_one_segment_schedule_refuses_more(schedule: str):
    with pytest.raises(PlanError, match=f"{schedule} runs one segment per rank, found 2; try"):
        rows(schedule, 2, 2, 4)


@pytest.mark.parametrize("group_size", [-1, 0, 1, 3])
def test_a_group_smaller_than_the_pipeline_is_refused(group_size):
    # Smallest that hung: p=3, v=2, m=3 in groups of 1, where 3F2 waits for 2F2, 2F2 for 2B0,
    # and 2B0 for 3B0, which comes after 3F2.
    with pytest.raises(PlanError, match=f"groups of {group_size} .* on 4 ranks; .* at least 4"):
        rows("interleaved", 4, 2, 8, group_size=group_size)


def test_an_unknown_schedule_is_refused_with_the_names_of_the_known():
    with pytest.raises(PlanError, match="unknown schedule 'gpipe'; choose from aiao, afab"):
        rows("gpipe", 2, 1, 2)
