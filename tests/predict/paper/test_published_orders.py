"""Orders of other papers take the time in our simulator that their authors state."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.observe.timeline import Lane, Timeline
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync
from megatron.fold3d.plan.passes.recompute import recompute_early
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate, steady_state
from tests.plans import built, planned, verified

DATA = Path(__file__).parents[2] / "data"
MERAK = json.loads((DATA / "merak_tables.json").read_text())["bubble"]["vectors"]


def simulated(schedule: str, ranks: int, microbatches: int, costs: Costs, early=()) -> Timeline:
    order = built(schedule, ranks, 1, microbatches)
    return simulate(verified(planned(recompute_early(order, early))), costs)


@pytest.mark.parametrize("vector", MERAK, ids=lambda v: f"s={v['s']} m={v['m']}")
def test_merak_iterations_are_exact(vector: dict[str, int]):
    ranks, microbatches, forward_s = vector["s"], vector["m"], vector["T"]
    every = Costs.uniform(
        ranks, forward_s=forward_s, backward_s=3 * forward_s, recompute_s=forward_s
    )
    all_but_the_last = replace(
        every,
        backward_s=(*every.backward_s[:-1], 2 * forward_s),
        recompute_s=(*every.recompute_s[:-1], 0),
    )
    for key, schedule, costs, early in (
        ("iter_1f1b", "1f1b", every, ()),
        ("iter_early", "1f1b", every, range(ranks)),
        ("iter_scp", "shifted-critical-path", all_but_the_last, range(ranks - 1)),
    ):
        assert simulated(schedule, ranks, microbatches, costs, early).makespan_s == vector[key]


def test_the_shifted_order_costs_nothing_where_nothing_is_recomputed():
    for ranks, microbatches in ((2, 6), (4, 8), (8, 32)):
        times = {
            simulated(schedule, ranks, microbatches, Costs.uniform(ranks)).makespan_s
            for schedule in ("1f1b", "shifted-critical-path")
        }
        assert len(times) == 1


def bubble_s(timeline: Timeline) -> float:
    """The most that a rank idles between its first and its last computation: the paper's bubble."""
    idle = []
    for rank in range(timeline.num_ranks):
        spans = timeline.lane(rank, Lane.COMPUTE)
        busy_s = sum(span.duration_s for span in spans)
        idle.append(spans[-1].end_s - spans[0].start_s - busy_s)
    return max(idle)


# Forward, backward without weight gradients, weight gradients, which are the shortest. Multiples of
# a power of two add up without rounding.
TIMES = [(1, 1, 1), (1, 1.25, 0.75), (2, 2.5, 1.5), (1, 2, 1), (4, 2, 1), (2, 4, 2), (1, 1, 0.25)]


@pytest.mark.parametrize("times", TIMES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_the_bubble_is_the_papers(ranks: int, more: int, times: tuple[float, float, float]):
    forward_s, backward_s, weight_s = times
    microbatches = 2 * ranks + more
    costs = replace(
        Costs.uniform(ranks, forward_s=forward_s, backward_s=backward_s + weight_s),
        weight_s=(weight_s,) * ranks,
    )
    # Qi et al., ICLR 2024, Table 2; 1F1B is Megatron's, Sec. 2.2.1.
    for schedule, sign in (("1f1b", 1), ("zb-h1", -1), ("zb-h2", -2)):
        found = bubble_s(simulated(schedule, ranks, microbatches, costs))
        assert found == (ranks - 1) * (forward_s + backward_s + sign * weight_s)


@pytest.mark.parametrize(
    ("schedule", "bubble", "flushed"), [("1f1b", 9, 9), ("zb-h1", 3, 3), ("zb-h2", 0, 3)]
)
def test_zb_h2_has_no_bubble_where_iterations_need_not_wait_for_all_ranks(
    schedule: str, bubble: int, flushed: int
):
    plan = built(schedule, 4, 1, 8)
    work_s = 8 * 3
    assert steady_state(plan, Costs.uniform(4)).period_s == work_s + bubble
    meeting = steady_state(add_grad_sync(plan), Costs.uniform(4))
    assert meeting.period_s == work_s + flushed
