"""Which segments' optimizer steps every replica takes in full."""

from megatron.fold3d.plan.ir import stages_of
from megatron.fold3d.predict.search.neighbours import units


def test_segments_that_share_parameters_are_chosen_together():
    assert units(4, tied=True) == ((1,), (2,), (0, 3))
    assert units(1, tied=True) == ((0,),)
    assert stages_of((0, 2), 3) == (0, 1, 2, 6, 7, 8)
