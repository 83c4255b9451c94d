"""What two micro-batches take together, and a pipeline of such pairs."""

import pytest

from megatron.fold3d.plan.compile import lower
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.passes.pairs import in_pairs, num_pairs
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.execution import Execution
from megatron.fold3d.predict.simulator.pair_times import pair_s, paired_s
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import planned

PAIRED = Execution(overlap_tensor_parallel=True)


@pytest.mark.parametrize(("t", "a"), [(3.0, 1.0), (1.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("layers", [1, 4])
def test_a_pair_takes_what_meraks_formula_says(t: float, a: float, layers: int):
    """Merak Sec. 5.3, of a forward: t and a are computation and collectives of one layer."""
    merak_s = t / 2 + 2 * (layers - 1 / 4) * max(t, a) + a / 2
    assert pair_s(layers * t, layers * a, 2 * layers) == pytest.approx(merak_s)


def test_recomputation_has_its_collectives_once_more():
    costs = Costs(forward_s=(2.0,), backward_s=(5.0,), recompute_s=(2.0,), tp_sync_s=(1.0,))
    assert paired_s(costs, 0, Op.FORWARD) == 1.0
    assert paired_s(costs, 0, Op.BACKWARD) == 3.0  # 3 of computation, 2 of collectives


def test_without_collectives_a_pair_gains_nothing():
    assert paired_s(Costs(forward_s=(2.0,), backward_s=(5.0,)), 0, Op.BACKWARD) == 5.0


def paired(m: int, p: int) -> Plan:
    order = build("1f1b", num_ranks=p, num_segments=1, num_microbatches=num_pairs(m))
    return planned(in_pairs(order, m), "pairs=on")


def test_a_pipeline_of_pairs_has_the_bubble_of_half_as_many_micro_batches():
    costs = Costs.uniform(4, forward_s=2.0, backward_s=4.0, tp_sync_s=1.0)
    one_by_one = build("1f1b", num_ranks=4, num_segments=1, num_microbatches=8)
    assert simulate(lower(one_by_one), costs).makespan_s == (8 + 3) * 6.0
    # A forward of a pair takes 2, a backward 6; four pairs and three of bubble.
    assert simulate(paired(8, 4), costs, PAIRED).makespan_s == (4 + 3) * 8.0


def test_a_pair_begins_when_both_inputs_are_there():
    order = Plan.from_text(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1"
    )
    costs = Costs.uniform(2, forward_s=2.0, backward_s=4.0, tp_sync_s=1.0)
    spans = simulate(order, costs, PAIRED).ranks[1]
    assert spans[0].start_s == 4.0  # the first rank's forwards are no pair: they take 2 each
