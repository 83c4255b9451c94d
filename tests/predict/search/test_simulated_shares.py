from dataclasses import replace

import pytest

from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.simulated_shares import auto_shares
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from tests.plans import built, deferred_grad_sync
from tests.predict.setups import candidate, estimated


def shares(costs: Costs, ranks: int = 1, microbatches: int = 2):
    plan = built("aiao", ranks, len(costs.forward_s) // ranks, microbatches)
    return auto_shares(deferred_grad_sync(plan), costs, Link(preemptive=False))


def test_each_segment_gets_what_fits_until_the_one_below_is_more_urgent():
    # Two micro-batches: a segment's gradients are ready 4 s after those of the one above.
    assert shares(Costs.uniform(3, grad_sync_s=4.0)) == pytest.approx((0, 1, 1))
    assert shares(Costs.uniform(3, grad_sync_s=8.0)) == pytest.approx((0, 0.5, 0.5))
    uneven = replace(Costs.uniform(3), grad_sync_s=(8.0, 2.0, 8.0))
    assert shares(uneven) == pytest.approx((0, 1, 0.75))


def test_parameters_reduced_in_the_iteration_have_no_share():
    # 8 s until the last backward ends; of 12 s of DP.sync 10 are deferred.
    tied = replace(Costs.uniform(2, grad_sync_s=12.0), reduced_in_iteration_s=(2.0, 2.0))
    assert shares(tied, microbatches=4) == pytest.approx((0, 0.8))


def test_messages_leave_less_of_the_link():
    alone = shares(Costs.uniform(8, grad_sync_s=20.0), ranks=2, microbatches=8)
    beside = shares(Costs.uniform(8, grad_sync_s=20.0, p2p_s=0.5), ranks=2, microbatches=8)
    assert alone[2:] == pytest.approx((0.8,) * 6)
    assert all(0.4 < share < 0.5 for share in beside[2:])  # half of the link is often taken


def test_one_segment_gets_share_zero():
    assert shares(Costs.uniform(2, grad_sync_s=1.0), ranks=2) == (0, 0)


@pytest.mark.parametrize("segments", [2, 4, 8])
def test_no_share_for_all_segments_is_much_better(segments):
    setup = Setup(data_parallel=2, fp32=True)
    known = estimated("testbed", "testbedx4", setup, 2, segments)
    auto = candidate("aiao:step=next", segments, 2, 8, setup)
    one_for_all = (auto.with_options(share=share) for share in (0.6, 0.7, 0.8, 0.9, 1.0))
    best_s = min(timeline_of(one, known).period_s for one in one_for_all)
    assert timeline_of(auto, known).period_s <= 1.005 * best_s  # found: 1.004
