import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.observe.exposure import exposure
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.passes.grad_sync import serial_grad_sync
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, deferred_grad_sync


def test_columns_of_a_run_by_hand():
    plan = Plan.from_text("0F0 0B0 0ALL_REDUCE 0STEP\n1F0 1B0 1ALL_REDUCE 1STEP\n")
    costs = Costs.uniform(2, p2p_s=0.5, grad_sync_s=3.0)
    first, last = exposure(simulate(plan, costs))
    # Rank 0: F 0-1, idle until B 5-7 (its message is under way from 4.5 on), DP.sync 7-10.
    assert (first.forward_s, first.backward_s, first.grad_sync_s) == (1.0, 2.0, 3.0)
    assert (first.bubble_s, first.p2p_s) == (3.5, 0.5)
    # Rank 1: idle until 1, message until 1.5, F and B until 4.5, DP.sync until 8 as its own
    # message goes first, idle until the iteration ends at 10.
    assert (last.bubble_s, last.p2p_s, last.grad_sync_s) == (3.0, 0.5, 3.5)


def test_copies_are_exposed_when_a_backward_waits_for_its_reload():
    plan = Plan.from_text("0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0B1\n")
    costs = Costs(forward_s=(1.0,), backward_s=(1.0,), offload_s=(2.0,), reload_s=(0.5,))
    (row,) = exposure(simulate(plan, costs))
    assert (row.copy_s, row.bubble_s) == (0.5, 1.0)


@pytest.mark.slow
@given(
    st.sampled_from(["aiao", "interleaved", "afab"]),
    st.sampled_from([serial_grad_sync, deferred_grad_sync]),
    st.floats(0.0, 2.0),
    st.floats(0.0, 9.0),
)
def test_columns_add_up_to_the_iteration(schedule, lower, p2p_s, grad_sync_s):
    plan = lower(built(schedule, 3, 2, 6))
    costs = Costs.uniform(6, p2p_s=p2p_s, grad_sync_s=grad_sync_s)
    timeline = simulate(plan, costs, Link(grad_sync_order="edf"), iterations=3)
    for rank, row in enumerate(exposure(timeline)):
        ends = timeline.iteration_ends_s(rank)
        assert row.total_s == pytest.approx(ends[2] - ends[1])
