"""Every stage recomputes its own number of layers: costs, bytes, and what fits."""

from dataclasses import replace

import pytest

from megatron.fold3d.observe.memory_curve import memory
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.recompute_by_stage import fewest_recomputed
from megatron.fold3d.predict.cost_model.sizes import Recompute, Setup
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, planned
from tests.predict.setups import estimated

SHAPE, CLUSTER = model_shape("gpt3-18b"), cluster("v100x64")
P, NS, M = 4, 5, 16
SETUP = Setup(
    tensor_parallel=8, data_parallel=2, microbatch_size=4, sequence_parallel=True, recompute="full"
)
PLAN = planned(built("aiao", P, NS, M))


def known(recompute: Recompute, counts: tuple[int, ...] = ()) -> Estimate:
    setup = replace(SETUP, recompute=recompute)
    return estimated(SHAPE, CLUSTER, setup, P, NS, recompute_layers=counts)


def test_recomputing_nothing_costs_what_it_does_without_recomputation():
    none, found = known("none"), known("full", (0,) * (P * NS))
    assert found.costs.backward_s == pytest.approx(none.costs.backward_s)
    assert not any(found.costs.recompute_s)
    assert found.footprint.saved_bytes == pytest.approx(none.footprint.saved_bytes)
    assert found.footprint.working_bytes == none.footprint.working_bytes


def test_recomputing_everything_changes_nothing():
    counts = tuple(len(layers) for layers in SHAPE.stage_layers(P * NS))
    assert known("full", counts) == known("full")


def test_the_fewest_that_fit_are_faster_and_never_exceed_the_memory():
    full = known("full")
    usable = 0.85 * CLUSTER.gpu_memory_bytes
    counts = fewest_recomputed(PLAN, SHAPE, SETUP, full.footprint, usable)
    found = known("full", counts)
    timeline = simulate(PLAN, found.costs)
    peaks = [rank.device_peak for rank in memory(timeline, found.footprint)]
    assert max(peaks) <= usable
    assert timeline.makespan_s < simulate(PLAN, full.costs).makespan_s
    # AIAO's last segment holds few micro-batches: it keeps all its layers, before any other does.
    assert counts[-P:] == (0,) * P
    assert sum(counts) > 0


def test_a_rank_that_does_not_fit_at_all_is_named():
    with pytest.raises(ValueError, match=r"rank 0: found \d+ bytes with all layers recomputed"):
        fewest_recomputed(PLAN, SHAPE, SETUP, known("full").footprint, 1e9)
