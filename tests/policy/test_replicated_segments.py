"""Which segments' optimizer steps every replica takes in full."""

from megatron.fold3d.plan.ir import stages_of
from megatron.fold3d.policy.replicated_segments import choose_replicated, units


def seconds(segments: tuple[int, ...]) -> float:
    """Ten seconds without any; one more than that unless it is said."""
    known = {(): 10.0, (1,): 9.0, (2,): 8.5, (1, 2): 8.49, (2, 3): 7.5, (0, 1): 7.0}
    return known.get(segments, 11.0)


def test_segments_are_added_and_exchanged_while_that_saves_enough():
    # 2 is better than 1, then 3 is added; neither is 0 or 1, which were best together.
    assert choose_replicated(units(4, tied=False), seconds) == ((2, 3), 7.5)
    # From (2,) no exchange leads to (0, 1), and removing from all of them does.
    assert choose_replicated(units(3, tied=False), seconds) == ((0, 1), 7.0)
    # 0.01 of 8.5 seconds is not worth the memory of another segment.
    assert choose_replicated([(1,), (2,)], seconds) == ((2,), 8.5)


def test_none_is_replicated_where_that_is_fastest():
    assert choose_replicated(units(2, tied=False), lambda some: 1.0 + len(some)) == ((), 1.0)


def test_memory_limits_them():
    one = choose_replicated(units(4, tied=False), seconds, lambda some: len(some) < 2)
    assert one == ((2,), 8.5)
    assert choose_replicated(units(4, tied=False), seconds, lambda _: False) == ((), 10.0)


def test_segments_that_share_parameters_are_chosen_together():
    assert units(4, tied=True) == ((1,), (2,), (0, 3))
    assert units(1, tied=True) == ((0,),)
    assert stages_of((0, 2), 3) == (0, 1, 2, 6, 7, 8)


def test_the_search_begins_where_it_is_told():
    # Two segments gain together and lose alone, so that the search from none ends at once.
    known = {(): 10.0, (0, 1): 9.0, (0, 1, 2): 8.0}
    choices = units(4, tied=False)

    def from_there(begin: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        return choose_replicated(choices, lambda some: known.get(some, 11.0), begins=(begin,))

    assert from_there(()) == ((), 10.0)
    assert from_there((0, 1)) == ((0, 1, 2), 8.0)
