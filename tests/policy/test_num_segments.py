import pytest

from megatron.fold3d.policy.num_segments import by_iteration_time, by_rule

RULE = {"compute_s": 10.0, "grad_sync_s": 8.0, "num_microbatches": 8}


# 16 messages per segment of 0.1 s, all but one micro-batch's hidden: 1.4 s per segment.
# 2: 2.8 + 4; 3: 4.2 + 5.33; 4: 5.6 + 6 is too much for 10 s.
@pytest.mark.parametrize(
    ("counts", "message_s", "chosen", "reason"),
    [
        ([1, 2, 3, 4, 6], 0.1, 3, ""),
        ([1, 2, 4], 0.0, 4, ""),  # free messages allow the most
        ([1, 2], 5.0, 1, "do not even fit"),
    ],
)
def test_the_rule_stops_where_messages_no_longer_fit(counts, message_s, chosen, reason):
    found = by_rule(counts, message_s=message_s, **RULE)
    assert found.num_segments == chosen
    assert reason in found.reason


def test_of_iterations_that_take_as_long_the_fewest_segments_are_taken():
    chosen = by_iteration_time({4: 8.0, 2: 8.0 + 1e-9, 1: 8.1}, tolerance=1e-6)
    assert chosen.num_segments == 2
    assert "4: 8 s, 2: 8 s, 1: 8.1 s" in chosen.reason
