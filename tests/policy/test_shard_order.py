"""The order in which parameters complete the shards that they lie in."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.policy.shard_order import in_turns, started_shares


def test_shards_are_complete_in_turns():
    # Of two shards fc2 and a half of fc1 are the first; qkv and proj are in the second.
    there = [(4, 0), (2, 2), (0, 3), (0, 1)]
    assert in_turns([4, 4, 3, 1], there) == [3, 0, 2, 1]


def test_with_one_shard_the_smallest_come_first():
    assert in_turns([4, 3, 1], [(4,), (3,), (1,)]) == [2, 1, 0]


def test_a_layer_of_two_replicas_starts_in_three_parts():
    shares = started_shares(1, 2)
    assert shares == ((1 / 12, 0.0), (5 / 12, 2 / 12), (8 / 12, 8 / 12), (1.0, 1.0))


def test_what_goes_to_its_owner_alone_starts_at_once():
    assert started_shares(1, 5) == started_shares(0, 2) == started_shares(4, 1) == ()


@given(st.integers(1, 12), st.integers(2, 4))
def test_nothing_starts_before_it_is_computed(num_layers: int, num_replicas: int):
    shares = started_shares(num_layers, num_replicas)
    assert shares[-1] == (1.0, 1.0)
    assert all(share <= work for work, share in shares)
    assert shares == tuple(sorted(shares))
