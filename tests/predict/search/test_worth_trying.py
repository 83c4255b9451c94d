"""The numbers of forwards ahead that are tried have the best of all among them."""

from collections.abc import Iterable

import pytest

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.predict.search.descent import Descent, Space, useful_forwards_ahead
from megatron.fold3d.predict.search.judge import Judge
from megatron.fold3d.predict.simulator.costs import Costs


@pytest.mark.parametrize("transfer_s", [0.0, 0.6, 1.2, 2.4])
@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
def test_more_forwards_ahead_than_are_tried_gain_nothing(num_microbatches, transfer_s):
    costs = Costs.uniform(4, p2p_s=transfer_s)

    def judge(choice: Choice) -> Judge:
        return Judge(
            job=Job(choice=choice, num_ranks=4, num_microbatches=num_microbatches), costs=costs
        )

    def best(numbers: Iterable[int]) -> float:
        orders = [Choice.plain("1f1b", 1, ahead=number) for number in numbers]
        return Descent(
            judge, Space(orders=orders, free={"wgrad": ("backward", "gaps")})
        ).best.seconds

    tried = useful_forwards_ahead(costs, 4, num_microbatches)
    assert best(tried) == best(range(1, num_microbatches + 1))


def test_one_microbatch_has_nothing_to_run_ahead():
    assert useful_forwards_ahead(Costs.uniform(4, p2p_s=1.0), 4, 1) == range(1, 2)
