from dataclasses import replace
from math import pi, sqrt
from random import Random
from statistics import mean

import pytest

from megatron.fold3d.predict.cost_model.cluster import NODES
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.cost_model.stragglers import slowdowns, slowest_of
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, planned
from tests.predict.setups import estimated

POD = replace(NODES["h100"], num_nodes=4, straggler_sigma=0.02)


def test_the_slowest_of_n_is_the_mean_of_their_largest():
    exact = {1: 0.0, 2: 1 / sqrt(pi), 3: 1.5 / sqrt(pi)}
    assert {n: slowest_of(n) for n in exact} == pytest.approx(exact, abs=1e-6)
    assert slowest_of(100) == pytest.approx(2.5076, abs=1e-4)  # of tables of order statistics
    assert slowest_of(1000) == pytest.approx(3.2414, abs=1e-4)


def test_the_rank_with_most_work_has_the_slowest_gpu():
    setup = Setup(tensor_parallel=2, data_parallel=4)
    usual, slowest = 1 + 0.02 * slowest_of(2), 1 + 0.02 * slowest_of(32)
    assert slowdowns(POD, setup, 2, (1, 2, 1, 2)) == (usual, slowest, usual, slowest)


def test_a_slow_gpu_computes_longer_and_sends_as_fast_as_others():
    shape, setup = model_shape("gpt3-18b"), Setup(tensor_parallel=8, recompute="full")
    alike, unlike = (
        estimated(shape, each, setup, 4).costs for each in (replace(POD, straggler_sigma=0.0), POD)
    )
    (slowest, usual), sync_s = (1 + 0.02 * slowest_of(n) for n in (32, 8)), alike.tp_sync_s[0]
    for stage, factor in enumerate((usual, usual, usual, slowest)):  # the last one has the head
        computed_s = factor * (alike.forward_s[stage] - sync_s)
        assert unlike.forward_s[stage] == pytest.approx(computed_s + sync_s)
        again_s = factor * (alike.recompute_s[stage] - sync_s) + sync_s
        assert unlike.recompute_s[stage] == pytest.approx(again_s)
        assert unlike.backward_s[stage] == pytest.approx(2 * (computed_s + sync_s) + again_s)
        assert unlike.weight_s[stage] == pytest.approx(factor * alike.weight_s[stage])
    assert (unlike.p2p_s, unlike.grad_sync_s) == (alike.p2p_s, alike.grad_sync_s)


@pytest.mark.parametrize(
    ("tensor_parallel", "work"),
    [(2, (1.0, 1.0, 1.0, 1.2)), (8, (1.0, 1.0, 1.0, 1.0))],  # the last rank has the head, or not
)
def test_pipelines_of_random_gpus_take_as_long_as_the_model_says(tensor_parallel, work):
    num_ranks, setup = len(work), Setup(tensor_parallel=tensor_parallel, data_parallel=4)
    plan = planned(built("1f1b", num_ranks, 1, 8))
    gpus, draw = num_ranks * 4 * tensor_parallel, Random(1)
    pod = replace(POD, num_nodes=gpus // 8)

    def iteration_s(factors):
        forward_s = tuple(f * w for f, w in zip(factors, work, strict=True))
        costs = Costs(forward_s=forward_s, backward_s=tuple(2 * s for s in forward_s))
        return simulate(plan, costs).period_s

    def group():
        return max(draw.gauss(1, pod.straggler_sigma) for _ in range(tensor_parallel))

    # Each sample is as slow as the slowest of its four pipelines of tensor-parallel groups.
    sampled_s = mean(max(iteration_s([group() for _ in work]) for _ in range(4)) for _ in range(30))
    modelled_s = iteration_s(slowdowns(pod, setup, num_ranks, work))
    assert iteration_s([1.0] * num_ranks) < 0.98 * sampled_s
    assert modelled_s == pytest.approx(sampled_s, rel=0.01)
