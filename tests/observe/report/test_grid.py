from megatron.fold3d.observe.report.grid import to_text
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate


def test_grid_shows_the_pipeline():
    plan = build("1f1b", num_ranks=3, num_segments=1, num_microbatches=3)
    assert to_text(simulate(plan, Costs.uniform(3))) == (
        "rank 0 | 0F0 0F1 0F2 ·   ·   ·   ·   0B0──── ·   0B1──── ·   0B2────\n"
        "rank 1 | ·   1F0 1F1 ·   ·   1B0──── 1F2 1B1──── ·   1B2──── ·   ·\n"
        "rank 2 | ·   ·   2F0 2B0──── 2F1 2B1──── 2F2 2B2──── ·   ·   ·   ·\n"
    )


def test_grid_goes_on_in_a_further_block():
    plan = build("1f1b", num_ranks=1, num_segments=1, num_microbatches=2)
    assert to_text(simulate(plan, Costs.uniform(1)), width=26) == (
        "rank 0 | 0F0 0B0──── 0F1\n\nrank 0 | 0B1────\n"
    )


def test_an_empty_timeline_has_rows():
    assert to_text(Timeline(((), ()))) == "rank 0 |\nrank 1 |\n"
