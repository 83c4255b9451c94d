from megatron.fold3d.policy.num_segments import by_iteration_time, by_rule

RULE = {"compute_s": 10.0, "grad_sync_s": 8.0, "num_microbatches": 8}


def test_the_rule_stops_where_messages_no_longer_fit():
    # 16 messages per segment of 0.1 s, all but one micro-batch's hidden: 1.4 s per segment.
    # 2: 2.8 + 4; 3: 4.2 + 5.33; 4: 5.6 + 6 is too much for 10 s.
    assert by_rule([1, 2, 3, 4, 6], message_s=0.1, **RULE).num_segments == 3


def test_free_messages_allow_the_most_segments():
    assert by_rule([1, 2, 4], message_s=0.0, **RULE).num_segments == 4


def test_one_segment_is_left_when_nothing_fits():
    chosen = by_rule([1, 2], message_s=5.0, **RULE)
    assert chosen.num_segments == 1
    assert "do not even fit" in chosen.reason


def test_of_iterations_that_take_as_long_the_fewest_segments_are_taken():
    chosen = by_iteration_time({4: 8.0, 2: 8.0 + 1e-9, 1: 8.1}, tolerance=1e-6)
    assert chosen.num_segments == 2
    assert "4: 8 s, 2: 8 s, 1: 8.1 s" in chosen.reason
