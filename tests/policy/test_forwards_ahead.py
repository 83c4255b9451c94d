"""How many forwards hide transfers, beside what the simulator says."""

import pytest

from megatron.fold3d.policy.forwards_ahead import forwards_that_hide
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built


@pytest.mark.parametrize(
    ("transfer_s", "ahead"),
    [(0, 1), (0.01, 2), (0.5, 2), (1.5, 2), (1.51, 3), (3, 3), (3.25, 4), (7.5, 6)],
)
@pytest.mark.parametrize(("schedule", "segments"), [("1f1b", 1), ("aiao", 3)])
def test_they_are_the_fewest_that_do(schedule, segments, transfer_s, ahead):
    # A latency: what a message waits for others on its link is not in it.
    costs = Costs.uniform(4 * segments, p2p_latency_s=transfer_s)
    assert forwards_that_hide(1.0, 2.0, transfer_s) == ahead

    def makespan_s(forwards_ahead: int) -> float:
        plan = built(schedule, 4, segments, 40, forwards_ahead=forwards_ahead)
        return simulate(plan, costs).makespan_s

    assert makespan_s(ahead) == pytest.approx(makespan_s(100), rel=1e-12)
    assert ahead == 1 or makespan_s(ahead - 1) > makespan_s(ahead)


def test_three_periods_to_the_last_digit_are_three():
    assert forwards_that_hide(0.1, 0.2, 0.45) == 4


def test_what_takes_no_time_needs_one_forward_ahead():
    assert forwards_that_hide(0.0, 0.0, 1.0) == 1
