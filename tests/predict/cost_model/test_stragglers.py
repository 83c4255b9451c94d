from dataclasses import replace
from math import pi, sqrt

import pytest

from megatron.fold3d.predict.cost_model.cluster import NODES
from megatron.fold3d.predict.cost_model.estimate import estimate
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.cost_model.stragglers import slowdowns, slowest_of

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
        estimate(shape, each, setup, num_ranks=4, num_segments=1).costs
        for each in (replace(POD, straggler_sigma=0.0), POD)
    )
    (slowest, usual), sync_s = (1 + 0.02 * slowest_of(n) for n in (32, 8)), alike.tp_sync_s[0]
    for stage, factor in enumerate((usual, usual, usual, slowest)):  # the last one has the head
        computed_s = factor * (alike.forward_s[stage] - sync_s)
        assert unlike.forward_s[stage] == pytest.approx(computed_s + sync_s)
        assert unlike.recompute_s[stage] == pytest.approx(computed_s + sync_s)
        assert unlike.backward_s[stage] == pytest.approx(3 * (computed_s + sync_s))
        assert unlike.weight_s[stage] == pytest.approx(factor * alike.weight_s[stage])
    assert (unlike.p2p_s, unlike.grad_sync_s) == (alike.p2p_s, alike.grad_sync_s)
