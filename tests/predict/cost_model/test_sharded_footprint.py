"""Bytes of parameters and gradients in shards, in the memory model."""

from dataclasses import replace

import pytest

from megatron.fold3d.observe.memory_curve import Footprint, memory
from megatron.fold3d.predict.cost_model.sharded_footprint import aiao_change, sharded_footprint
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, planned

SETUP = Setup(data_parallel=8, distributed_optimizer=True)


@pytest.mark.parametrize(
    ("shards", "bytes_per_parameter"), [("off", 7.5), ("weights", 6.1875), ("gradients", 3.5)]
)
def test_bytes_per_parameter_of_eight_segments_and_eight_replicas(shards, bytes_per_parameter):
    change = aiao_change((4 / 8,) * 8, SETUP, shards)
    assert 2 + 4 + 12 / 8 + change == pytest.approx(bytes_per_parameter)


@pytest.mark.parametrize("shards", ["weights", "gradients"])
@pytest.mark.parametrize(("num_ranks", "num_segments", "num_microbatches"), [(2, 3, 4), (4, 8, 9)])
def test_each_rank_of_aiao_holds_what_one_alone_would(
    shards, num_ranks, num_segments, num_microbatches
):
    order = built("aiao", num_ranks, num_segments, num_microbatches)
    plan = planned(order, shards=shards)
    gradients = [4.0 + stage % 5 for stage in range(plan.num_stages)]
    whole = Footprint(static_bytes=(100.0,) * num_ranks, saved_bytes=(1.0,) * plan.num_stages)
    found = sharded_footprint(whole, plan, gradients, SETUP)
    assert found.step_bytes == whole.static_bytes
    for rank, static in enumerate(found.static_bytes):
        change = aiao_change(gradients[rank::num_ranks], SETUP, shards)
        assert static == pytest.approx(100 + change)
        assert change < 0


def test_the_step_holds_all_that_is_whole_and_no_activations():
    order = built("aiao", 1, 2, 3)
    timeline = simulate(planned(order), Costs.uniform(2, forward_s=1, backward_s=2))
    footprint = Footprint(static_bytes=(4.0,), saved_bytes=(1.0, 1.0))
    assert memory(timeline, footprint)[0].device_peak == 4 + 4
    at_step = replace(footprint, step_bytes=(7.0,))
    assert memory(timeline, at_step)[0].device_peak == 4 + 4
    at_step = replace(footprint, step_bytes=(9.0,))
    assert memory(timeline, at_step)[0].device_peak == 9


# All of 8 bytes of gradients, or those of one stage of two beside all activations.
@pytest.mark.parametrize(
    ("saved", "peak"), [(0.0, 2 + 8 + 0.0), (1.0, 2 + 8 + 2.0), (3.0, 2 + 4 + 12.0)]
)
def test_gradients_of_the_iteration_before_are_gone_when_activations_are_held(saved, peak):
    order = built("afab", 1, 2, 2)
    plan = planned(order, "step=next", steps_shards=True, shards="gradients")
    timeline = simulate(plan, Costs.uniform(2, forward_s=1, backward_s=2), iterations=2)
    whole = Footprint(static_bytes=(10.0,), saved_bytes=(saved,) * 2)
    found = sharded_footprint(whole, plan, (4.0, 4.0), SETUP)
    assert memory(timeline, found)[0].device_peak == peak
