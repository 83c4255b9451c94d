from dataclasses import replace

import pytest

from megatron.fold3d.observe.timeline import Lane, Span, Timeline
from megatron.fold3d.plan.ir import Action, Plan, PlanError
from megatron.fold3d.plan.ops import COMPUTE_OPS
from megatron.fold3d.plan.passes.carried_grad_sync import share_grad_sync
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync, serial_grad_sync
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.replay import (
    as_synced,
    observed_costs,
    observed_plan,
    replay,
)
from megatron.fold3d.predict.simulator.simulate import simulate, steady_state
from tests.plans import built, deferred_grad_sync, planned

AIAO = built("aiao", 3, 2, 5)
COSTS = replace(
    Costs.uniform(6, p2p_s=0.25, grad_sync_s=4.0),
    forward_s=(1.0, 1.5, 1.0, 1.25, 1.0, 2.0),
    optimizer_s=(0.5,) * 6,
)


@pytest.mark.parametrize("sync", [add_grad_sync, serial_grad_sync])
def test_the_order_and_the_costs_of_a_run_are_found_again(sync):
    timeline = simulate(sync(AIAO), COSTS, iterations=2)
    plan = observed_plan(timeline)
    assert plan == sync(AIAO)
    found = observed_costs(timeline, plan)
    assert found.forward_s == pytest.approx(COSTS.forward_s)
    assert found.backward_s == pytest.approx(COSTS.backward_s)
    assert found.optimizer_s == pytest.approx(COSTS.optimizer_s)
    assert found.p2p_s == pytest.approx(0.25)
    assert found.grad_sync_s == pytest.approx(COSTS.grad_sync_s, rel=0.3)  # links are shared


def shared_grad_sync(order: Plan) -> Plan:
    return share_grad_sync(deferred_grad_sync(order), (0.5,) * order.num_stages)


@pytest.mark.parametrize("sync", [add_grad_sync, deferred_grad_sync, shared_grad_sync])
def test_a_replay_takes_about_as_long_as_what_it_replays(sync):
    plan = sync(AIAO)
    run = steady_state(plan, COSTS)
    again = replay(plan, observed_costs(run, plan), iterations=2)
    assert len(again.iteration_ends_s(0)) == 2
    assert again.period_s == pytest.approx(run.period_s, rel=0.05)
    assert min(span.start_s for spans in again.ranks for span in spans) == 0.0


def test_sums_to_shards_are_found_again():
    plan = planned(AIAO, transfers=False, steps_shards=True)
    assert observed_plan(simulate(plan, COSTS)) == plan


def test_only_stages_whose_weight_gradients_are_delayed_are_split():
    costs = replace(COSTS, weight_s=(0.75,) * 6)
    plan = add_grad_sync(delay_weight_grads(AIAO, [1]))
    timeline = simulate(plan, costs, iterations=2)
    assert observed_plan(timeline) == plan
    found = observed_costs(timeline, plan)
    assert found.weight_s == pytest.approx((0.0,) * 3 + (0.75,) * 3)
    assert found.backward_s == pytest.approx(costs.backward_s)
    again = replay(plan, found, iterations=2)
    assert again.period_s == pytest.approx(timeline.period_s, rel=0.05)


def test_reductions_that_share_a_link_take_no_longer_together_than_it_was_busy():
    """They were all started, and went one after the other."""
    order = Plan.from_text("0F0 1F0 1B0 0B0")
    names = [("0F0", 0, 1), ("1F0", 1, 2), ("1B0", 2, 4), ("0B0", 4, 6)]
    spans = [Span(Lane.COMPUTE, a, b, Action.from_str(name)) for name, a, b in names]
    spans += [
        Span(Lane.GRAD_SYNC, 4.0, 10.0, Action.from_str("1ALL_REDUCE")),
        Span(Lane.GRAD_SYNC, 6.0, 10.0, Action.from_str("0ALL_REDUCE")),
    ]
    assert observed_costs(Timeline.of([spans]), order).grad_sync_s == (0.0, 6.0)


def test_a_plan_that_synced_at_its_end_is_replayed_so():
    serial = simulate(serial_grad_sync(AIAO), COSTS)
    assert as_synced(add_grad_sync(AIAO), serial) == serial_grad_sync(AIAO)
    overlapped = simulate(add_grad_sync(AIAO), COSTS)
    assert as_synced(add_grad_sync(AIAO), overlapped) == add_grad_sync(AIAO)


def test_a_stage_that_was_not_recorded_is_named():
    half = Plan(tuple(p[:1] for p in AIAO.select(COMPUTE_OPS).programs))
    timeline = simulate(half, Costs.uniform(3))
    with pytest.raises(PlanError, match="no B of stage 0 in the trace; trace whole iterations"):
        observed_costs(timeline, half)
