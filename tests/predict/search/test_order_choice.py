"""The numbers of forwards ahead that are tried have the best of all among them."""

import pytest

from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.search.order_choice import choose_order, worth_trying
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.execution import Execution
from megatron.fold3d.predict.simulator.simulate import simulate


@pytest.mark.parametrize("transfer_s", [0.0, 0.6, 1.2, 2.4])
@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
def test_more_forwards_ahead_than_are_tried_gain_nothing(num_microbatches, transfer_s):
    costs = Costs.uniform(4, p2p_s=transfer_s)

    def order(ahead: int | None) -> Plan:
        return build(
            "1f1b",
            num_ranks=4,
            num_segments=1,
            num_microbatches=num_microbatches,
            forwards_ahead=ahead,
        )

    def judge(plan: Plan) -> tuple[bool, float]:
        return True, simulate(plan, costs, Execution(in_order=True)).period_s

    def best(numbers: range) -> float:
        return choose_order(
            order, costs, judge, forwards_ahead=numbers, places_weight_grads=True
        ).seconds

    tried = worth_trying(costs, 4, num_microbatches)
    assert best(tried) == best(range(1, num_microbatches + 1))


def test_one_microbatch_has_nothing_to_run_ahead():
    assert worth_trying(Costs.uniform(4, p2p_s=1.0), 4, 1) == range(1, 2)
