"""Gathers of parameters whose reduce-scatter ends behind forwards."""

from typing import Any

import pytest

from megatron.fold3d.plan.passes.carried_grad_sync import share_grad_sync
from megatron.fold3d.plan.passes.gather_later import gather_later
from tests.plans import built, planned, rows

SHARDED: dict[str, Any] = {"parts": "step=next", "gathers_params": True}


def test_a_reduce_scatter_ends_behind_forwards_of_the_stage_before():
    plan = built("afab", 1, 3, 2)
    carried = planned(plan, **SHARDED)
    after = (
        "0STEP 0ALL_GATHER 0F0 1STEP 1ALL_GATHER 0F1 1F0 1F1 2STEP 2ALL_GATHER 2F0 2F1 "
        "2B0 2B1 2REDUCE_KEPT 2REDUCE_SCATTER 1B0 1B1 1REDUCE_KEPT 1REDUCE_SCATTER "
        "0B0 0B1 0REDUCE_KEPT 0REDUCE_SCATTER 2FINALIZE 1FINALIZE 0FINALIZE"
    )
    # The first stage has none before it; stage 2 waits for all forwards of stage 1.
    shares = (0.0, 0.8, 0.0)
    moved = gather_later(carried, shares, 0.2)
    assert rows(moved) == [after]
    assert planned(plan, **SHARDED, shares=shares, parameter_share=0.2) == share_grad_sync(
        moved, shares
    )
    assert gather_later(carried, (1.0,) * 3, 0.2) == carried


@pytest.mark.parametrize(
    ("share", "parameter_share", "forwards"),
    # Of eight: as much is left as is gathered; half of that; a third; nothing; nothing is gathered.
    [(0.0, 1.0, 4), (0.0, 0.5, 5), (0.5, 1.0, 3), (1.0, 1.0, 0), (0.0, 0.0, 8)],
)
def test_a_reduce_scatter_and_an_all_gather_divide_the_forwards_between_them(
    share: float, parameter_share: float, forwards: int
):
    plan = built("afab", 1, 2, 8)
    moved = gather_later(planned(plan, **SHARDED), (share, share), parameter_share)
    assert moved.to_text().partition("1ALL_GATHER")[0].count("0F") == forwards


def test_only_gathers_of_carried_stages_move():
    plan = built("aiao", 1, 2, 2)
    for lowered in (planned(plan, gathers_params=True), planned(plan, "step=next")):
        assert gather_later(lowered, (0.5, 0.5), 1.0) == lowered
