"""Megatron's own overlap of experts' all-to-alls."""

from dataclasses import replace

from megatron.fold3d.plan.passes.combined import combined, one_more_ahead
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built


def test_no_forward_is_combined_with_its_own_backward():
    order = built("interleaved", 4, 2, 8)
    for program in one_more_ahead(order).programs:
        both = list(combined(program))
        assert both
        assert all(forward[::2] != backward[::2] for forward, backward in both)


def test_each_computes_during_the_all_to_alls_of_the_other():
    order = one_more_ahead(built("1f1b", 1, 1, 4))
    assert " ".join(map(str, order.programs[0])) == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    costs = replace(Costs.uniform(1), ep_sync_s=(0.5,))
    assert simulate(order, costs, Link()).period_s == 12
    # F0 and B3 hide nothing, and are 3 of 12; the others hide 1 of 3.
    assert simulate(order, costs, Link(combined=True)).period_s == 3 + 3 * 2
    sends = replace(costs, forward_s=(1.5,), backward_s=(2.0,), ep_sync_s=(1.5,))
    assert simulate(order, sends, Link(combined=True)).period_s == 3.5 + 3 * 3
