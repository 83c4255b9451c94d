"""The layers of stages: what the search finds is what looking at all layouts finds."""

import random
from collections.abc import Iterator
from itertools import product
from math import inf

import pytest

from megatron.fold3d.policy.partition import Layers, Partition, RankTimes, best_partition


def layouts(num_layers: int, num_stages: int) -> Iterator[Layers]:
    counts = product(range(1, num_layers - num_stages + 2), repeat=num_stages)
    return (layers for layers in counts if sum(layers) == num_layers)


def partition(times: RankTimes | None, start: Layers, iteration_s, most=10_000) -> Partition:
    return best_partition(start, iteration_s=iteration_s, times=times, most_simulated=most)


@pytest.mark.parametrize("seed", range(40))
def test_nothing_that_fits_is_better_than_what_is_exact(seed: int):
    rng = random.Random(seed)
    ranks, segments = rng.choice(((2, 1), (3, 1), (4, 1), (2, 2), (3, 2)))
    stages = ranks * segments
    num_layers = rng.randint(stages, stages + 5)
    times = RankTimes(
        layer_s=rng.choice((1.0, 0.3)),
        rank_s=tuple(rng.choice((0.0, 0.5, 2.0)) for _ in range(ranks)),
        num_microbatches=rng.randint(1, 8),
    )
    noise_s = {layers: rng.choice((0.0, 0.4, 1.0)) for layers in layouts(num_layers, stages)}
    start, *_ = rng.sample(sorted(noise_s), 1)
    too_large = {layers for layers in noise_s if rng.random() < 0.2} - {start}

    def iteration_s(layers: Layers) -> float:
        return inf if layers in too_large else times.iteration_s(layers) + noise_s[layers]

    found = partition(times, start, iteration_s)
    assert found.is_exact
    assert found.iteration_s == pytest.approx(min(map(iteration_s, noise_s)))
    assert found.iteration_s == iteration_s(found.layers)
    assert found.simulated <= len(noise_s)


def test_without_times_of_ranks_moves_alone_balance_the_work():
    found = partition(None, (4, 4, 4, 4), lambda layers: max(*layers[:-1], layers[-1] + 3))
    assert sum(found.layers) == 16
    assert found.iteration_s == 5
    assert not found.is_exact


def test_of_equals_the_start_stays():
    times = RankTimes(layer_s=1.0, rank_s=(0.0, 0.0), num_microbatches=2)
    found = partition(times, (2, 2), lambda layers: 10.0)
    assert (found.layers, found.is_exact) == ((2, 2), True)


def test_a_search_that_is_cut_off_says_so():
    times = RankTimes(layer_s=1.0, rank_s=(0.0,) * 4, num_microbatches=1)
    found = partition(times, (9, 1, 1, 1), lambda layers: 9.0 + min(layers), most=3)
    assert (found.is_exact, found.simulated) == (False, 3)
    wide = partition(times, (30, 30, 30, 30), lambda _: 1e6)  # more than are looked at
    assert (wide.is_exact, wide.simulated) == (False, 13)  # each move


def test_a_start_that_does_not_fit_is_left():
    times = RankTimes(layer_s=1.0, rank_s=(0.0, 0.0), num_microbatches=1)
    fits = {(2, 4)}
    found = partition(times, (3, 3), lambda layers: 4.0 if layers in fits else inf)
    assert found.layers == (2, 4)
