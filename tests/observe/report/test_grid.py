from megatron.fold3d.observe.report.grid import to_text
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built


def test_grid_goes_on_in_a_further_block():
    plan = built("1f1b", 1, 1, 2)
    assert to_text(simulate(plan, Costs.uniform(1)), width=26) == (
        "rank 0 | 0F0 0B0──── 0F1\n\nrank 0 | 0B1────\n"
    )


def test_an_empty_timeline_has_rows():
    assert to_text(Timeline(((), ()))) == "rank 0 |\nrank 1 |\n"
