"""The lower bound is below every simulated order, and close to the best."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.passes.place_weight_grads import place_weight_grads
from megatron.fold3d.plan.schedules import FORWARDS_AHEAD, ONE_SEGMENT_SCHEDULES
from megatron.fold3d.predict.search.judge import stage_times
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.lower_bound import Bounds
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, planned


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_order_is_faster_than_the_bound(data: st.DataObject):
    schedule = data.draw(st.sampled_from(("aiao", "1f1b", "interleaved", "afab", "zb-h1")))
    ranks = data.draw(st.integers(1, 4))
    plan = built(
        schedule,
        ranks,
        1 if schedule in ONE_SEGMENT_SCHEDULES else data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 8)),
        forwards_ahead=data.draw(st.integers(1, 3)) if schedule in FORWARDS_AHEAD else None,
    )
    some = st.sampled_from((0.25, 1.0, 2.0))
    stages = range(plan.num_stages)
    costs = replace(
        Costs.uniform(plan.num_stages),
        forward_s=tuple(data.draw(some) for _ in stages),
        p2p_s=data.draw(st.sampled_from((0.0, 0.5, 1.0, 3.0))),
        p2p_latency_s=data.draw(st.sampled_from((0.0, 0.1))),
    )
    nics = data.draw(st.sampled_from((tuple(range(ranks)), tuple(r // 2 for r in range(ranks)))))
    link = Link(nic_of_rank=nics)
    whole = simulate(plan, costs, link).period_s
    assert Bounds(plan, costs, nics).order_s <= whole + 1e-9
    if schedule != "zb-h1":
        placed = place_weight_grads(plan, stage_times(costs), overrun=0.5)
        apart = simulate(placed, costs, link).period_s
        assert Bounds(plan, costs, nics).order_s <= apart + 1e-9


@pytest.mark.parametrize("microbatches", [8, 16])
def test_the_bound_is_that_of_the_last_rank(microbatches: int):
    plan = built("1f1b", 4, 1, microbatches)
    costs = Costs.uniform(4, p2p_s=0.5)  # F, B and W take 1 each; three hops of 0.5
    assert Bounds(plan, costs).order_s == 3 * 1.5 + microbatches * 3


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_order_with_dp_sync_is_faster_than_the_bound(data: st.DataObject):
    schedule = data.draw(st.sampled_from(("aiao", "1f1b", "interleaved", "afab")))
    order = built(
        schedule,
        data.draw(st.integers(1, 3)),
        1 if schedule in ONE_SEGMENT_SCHEDULES else data.draw(st.integers(1, 5)),
        data.draw(st.integers(1, 6)),
    )
    some, stages = st.sampled_from((0.25, 1.0, 2.0)), range(order.num_stages)
    costs = replace(
        Costs.uniform(order.num_stages),
        forward_s=tuple(data.draw(some) for _ in stages),
        grad_sync_s=tuple(data.draw(st.sampled_from((0.5, 3.0, 9.0))) for _ in stages),
        param_gather_s=tuple(data.draw(st.sampled_from((0.0, 2.0))) for _ in stages),
        p2p_s=data.draw(st.sampled_from((0.0, 0.2, 1.0, 3.0))),
    )
    deferred = data.draw(st.booleans())
    choice = Choice.plain(schedule, order.num_segments)
    for segment in data.draw(st.sets(st.integers(0, order.num_segments - 1))):
        choice = choice.changed((segment,), wgrad=data.draw(st.sampled_from(("behind", "last"))))
    if deferred:
        choice = choice.changed(step="next")
    reduces_early = data.draw(st.booleans())
    plan = planned(order, choice, gathers_params=True, reduces_early=reduces_early)
    link = Link(grad_sync_order="edf" if deferred else "fifo")
    period_s = simulate(plan, costs, link, iterations=4).period_s
    assert Bounds(plan, costs).with_sync_s(waits_for_norm=not deferred) <= period_s + 1e-9


def test_a_step_that_waits_for_the_norm_hides_less():
    plan = built("aiao", 1, 4, 5)
    costs = Costs.uniform(4, grad_sync_s=10.0)  # F takes 1, B 2: 60 s of computation
    bounds = Bounds(plan, costs)
    assert bounds.order_s == 60
    assert bounds.sync_s == 60  # 40 s of DP.sync, and 5 x 1 + 4 x 2 in which the link idles
    assert bounds.norm_s == 4 * 5 + 4 * 2 + 40  # all forwards, one chunk's backwards, DP.sync
    gathered = Bounds(plan, replace(costs, grad_sync_s=(1.0,) * 4, param_gather_s=(10.0,) * 4))
    assert gathered.sync_s == 60  # 44 + 13
    assert gathered.norm_s == 40 + 5 * 1 + 4 * 5 * 2  # one chunk's forwards, and all backwards


@pytest.mark.parametrize(
    ("reduce_s", "exposed_s"),
    [
        (9.0, 9),  # what weight gradients overlap, they add: they take 5 s
        (4.0, 4 - 3 * (5 - 4)),
        (2.0, 0),
    ],
)
def test_a_step_that_waits_for_the_norm_exposes_the_first_chunks_dp_sync(reduce_s, exposed_s):
    plan = built("aiao", 2, 4, 5)
    costs = replace(  # F and W take 1, B with W 2
        Costs.uniform(8, grad_sync_s=reduce_s), param_gather_s=(5.0,) * 8
    )
    found_s = Bounds(plan, costs).with_sync_s(waits_for_norm=True)
    assert found_s == 5 + 4 * 5 * 3 + exposed_s


def test_messages_share_the_link_with_dp_sync():
    plan = built("aiao", 1, 4, 5)
    one = Costs.uniform(4, grad_sync_s=20.0)  # F takes 1, B 2
    assert Bounds(plan, one).with_sync_s(waits_for_norm=False) == 4 * 20 + 5 * 1 + 4 * 2
    plan = built("aiao", 2, 4, 5)
    costs = Costs.uniform(8, grad_sync_s=20.0, p2p_s=0.5)
    # From the first rank to the second and back, which computes F and, without W, B.
    link_idles_s = (1 + 0.5) + 5 * (1 + 1) + (0.5 + 1)
    # Results of 15 forwards and of 15 backwards leave beside DP.sync, or the second rank computes
    # others meanwhile. That is free before its first input arrives and behind its last gradient.
    sends_s = (15 - 1.5) * 0.5 + (15 - 1.5) * 0.5
    found_s = Bounds(plan, costs).with_sync_s(waits_for_norm=False)
    assert found_s == 4 * 20 + link_idles_s + sends_s
    slow = replace(costs, p2p_s=9.0)  # then the second rank computes all of them meanwhile
    found_s = Bounds(plan, slow).with_sync_s(waits_for_norm=False)
    assert found_s == 4 * 20 + (1 + 9) + 5 * (1 + 1) + (9 + 1) + (15 - 10) + (15 - 10)
    in_one_node = Bounds(plan, costs, (0, 0)).with_sync_s(waits_for_norm=False)
    assert in_one_node == 4 * 20 + 5 * 1 + 5 * 2  # of the second rank
