"""What two micro-batches take together, and a pipeline of such pairs."""

import pytest

from megatron.fold3d.observe.timeline import Lane
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.passes.pairs import in_pairs, num_pairs
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.pair_times import in_turns_s, pair_s
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, planned

PAIRED = Link(overlap_tensor_parallel=True)


@pytest.mark.parametrize(("t", "a"), [(3.0, 1.0), (1.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("layers", [1, 4])
def test_a_pair_takes_what_meraks_formula_says(t: float, a: float, layers: int):
    """Merak Sec. 5.3, of a forward: t and a are computation and collectives of one layer."""
    merak_s = t / 2 + 2 * (layers - 1 / 4) * max(t, a) + a / 2
    assert pair_s(layers * t, layers * a, 2 * layers) == pytest.approx(merak_s)


def test_recomputation_has_its_collectives_once_more():
    costs = Costs(forward_s=(2.0,), backward_s=(5.0,), recompute_s=(2.0,), tp_sync_s=(1.0,))
    assert sum(in_turns_s(costs, 0, Op.FORWARD)) == 2 * 1.0
    assert sum(in_turns_s(costs, 0, Op.BACKWARD)) == 2 * 3.0  # of computation; 2 of collectives


def test_without_collectives_a_pair_gains_nothing():
    costs = Costs(forward_s=(2.0,), backward_s=(5.0,))
    assert in_turns_s(costs, 0, Op.BACKWARD) == (0.0, 2 * 5.0)


def test_the_ends_of_a_chain_are_exposed_and_not_those_of_each_pair():
    costs = Costs(
        forward_s=(6.0,), backward_s=(10.0,), tp_sync_s=(1.0,), ep_sync_s=(1.0,), collectives=(4,)
    )
    chain = Plan.from_text("0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4")
    spans = simulate(chain, costs, PAIRED).ranks[0]
    # Parts of a forward take 1, collectives half as long.
    ends_s = [1.0, 8.0, 9.0, 16.5, 16.5 + 6.0]
    assert [span.end_s for span in spans[:5]] == ends_s


def paired(m: int, p: int) -> Plan:
    order = built("1f1b", p, 1, num_pairs(m))
    return planned(in_pairs(order, m), "pairs=on")


def test_a_pipeline_of_pairs_has_the_bubble_of_half_as_many_micro_batches():
    costs = Costs.uniform(4, forward_s=2.0, backward_s=4.0, tp_sync_s=1.0)
    one_by_one = built("1f1b", 4, 1, 8)
    assert simulate(planned(one_by_one), costs).makespan_s == (8 + 3) * 6.0
    # A forward of a pair takes 2, a backward 6; four pairs and three of bubble.
    assert simulate(paired(8, 4), costs, PAIRED).makespan_s == (4 + 3) * 8.0


def test_the_second_of_a_pair_waits_for_its_own_input():
    order = Plan.from_text(
        "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1"
    )
    costs = Costs.uniform(2, forward_s=2.0, backward_s=4.0, tp_sync_s=1.0, p2p_s=1.0)
    spans = simulate(order, costs, Link(overlap_tensor_parallel=True)).lane(1, Lane.COMPUTE)
    # A pair takes 2, which both are given here to its second; then messages arrive one by one.
    assert [(span.start_s, span.end_s) for span in spans[:2]] == [(3.0, 3.0), (4.0, 6.0)]
