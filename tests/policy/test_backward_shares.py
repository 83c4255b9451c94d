"""Shares of DP.sync behind the backward, by hand."""

import random

import pytest

from megatron.fold3d.policy.backward_shares import backward_shares


def test_a_share_is_the_part_of_the_window_up_to_the_next_segment():
    assert backward_shares((30, 20, 10, 0), (20, 20, 20, 20)) == (0, 0.5, 0.5, 0.5)


def test_what_is_left_of_a_window_goes_to_the_lowest_segment_that_waits():
    # Segment 2 has 10 for its 16, segment 1 needs 4 of its 10 and segment 2 gets the 6 it lacks.
    assert backward_shares((20, 10, 0), (8, 4, 16)) == (0, 1, 1)
    assert backward_shares((20, 10, 0), (8, 8, 16)) == (0, 1, 0.75)


def test_segments_may_end_in_any_order():
    assert backward_shares((0, 10, 30), (40, 10, 10)) == (0.75, 0, 0)
    assert backward_shares((10, 0, 20), (4, 10, 10)) == (1, 1, 0)


def test_one_segment_has_no_window_and_nothing_to_reduce_is_reduced():
    assert backward_shares((5,), (3,)) == (0,)
    assert backward_shares((10, 0), (0, 0)) == (1, 1)


@pytest.mark.parametrize("seed", range(50))
def test_the_network_rests_only_when_all_that_is_ready_is_through(seed: int):
    draw = random.Random(seed)
    ready_s = [draw.random() for _ in range(5)]
    sync_s = [draw.random() / 3 for _ in range(5)]
    # Work conservation: what any order leaves at the end, computed without segments.
    backlog_s, now_s = 0.0, min(ready_s)
    for at_s, work_s in sorted(zip(ready_s, sync_s, strict=True)):
        backlog_s = max(0.0, backlog_s - (at_s - now_s)) + work_s
        now_s = at_s

    shares = backward_shares(ready_s, sync_s)

    left_s = sum(s * (1 - share) for s, share in zip(sync_s, shares, strict=True))
    assert left_s == pytest.approx(backlog_s)
    assert all(0 <= share <= 1 for share in shares)
