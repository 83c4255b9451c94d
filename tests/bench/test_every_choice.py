"""Every choice of a small job, against those that are simulated one by one."""

from dataclasses import replace
from itertools import product

import pytest

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.schedules import build
from scripts.bench import grid
from scripts.bench.every_choice import PLACES, Begun, EveryChoice
from scripts.bench.grid import Layout
from scripts.bench.predict import Job

LAYOUT = Layout(num_ranks=2, data_parallel=2, recompute=False, rates=("100mbit",))


@pytest.fixture
def every() -> EveryChoice:
    """Four segments of two layers on each of two ranks, and three micro-batches."""
    job = Job.read(grid.arguments(LAYOUT, "100mbit"))
    order = build("aiao", num_ranks=2, num_segments=4, num_microbatches=3)
    return EveryChoice(replace(job, num_microbatches=3), order)


def choices(every: EveryChoice) -> list[Choice]:
    found = []
    for replicated, places in product(every.replicated, product(PLACES, repeat=4)):
        choice = Choice.plain("aiao", 4).changed(replicated, optimizer="replicated")
        for segment, place in enumerate(places):
            choice = choice.changed((segment,), wgrad=place)
        found.append(choice)
    return found


def test_no_choice_is_faster_than_the_least(every: EveryChoice):
    least_s = min(every._timeline(choice).period_s for choice in choices(every))
    num_choices, every.num_simulated = every.num_simulated, 0
    assert every.least_s(0.0) == pytest.approx(least_s, rel=1e-9)
    every.num_simulated = 0
    found_s = every.least_s(0.1)
    assert found_s is not None
    assert least_s <= found_s <= least_s / 0.9
    assert every.num_simulated < num_choices / 2


def test_a_search_ends_after_the_simulations_that_it_may_make(every: EveryChoice):
    assert every.least_s(0.0, most=3) is None
    assert every.num_simulated == 3


def test_what_has_the_same_places_is_not_faster_than_the_bound(every: EveryChoice):
    for choice in choices(every)[::7]:
        period_s = every._timeline(choice).period_s
        for first in range(5):
            some = Begun(choice.changed(range(first), wgrad="behind"), num_fixed=4 - first)
            assert every._bound_s(some, every._timeline(some.choice)) <= period_s + 1e-9
