from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.observe.memory_curve import Footprint, Memory, memory
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.passes.offload import add_offload
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import (
    Setup,
    delayed_bytes,
    held_parameters,
    layer_bytes,
    message_bytes,
    saved_bytes,
    static_bytes,
    working_bytes,
)
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.simulate import simulate, steady_state
from tests.plans import built, deferred_grad_sync
from tests.predict.setups import estimated

# Over time


def over_time(text: str, costs: Costs, static: float = 0.0, **each: float) -> Memory:
    """The memory of a rank with one stage; bytes of a micro-batch that is saved, and so on."""
    sizes = {f"{name}_bytes": (size,) for name, size in each.items()}
    footprint = Footprint(static_bytes=(static,), **sizes)
    (rank,) = memory(simulate(Plan.from_text(text), costs), footprint)
    return rank


def test_a_micro_batch_is_held_from_its_forward_to_its_backward():
    rank = over_time("0F0 0F1 0B0 0B1", Costs.uniform(1), 100.0, saved=8.0)
    assert rank.device == {0: 108, 1: 116, 4: 108, 6: 100}
    assert rank.host_peak == 0.0


def test_an_offloaded_micro_batch_is_on_both_sides_while_it_is_copied():
    costs = Costs(forward_s=(2.0,), backward_s=(2.0,), offload_s=(1.0,), reload_s=(1.0,))
    rank = over_time("0F0 0OFFLOAD0 0F1 0RELOAD0 0B1 0B0", costs, saved=8.0, working=3.0)
    # F0 0-2, OFFLOAD 2-3, F1 2-4, RELOAD 4-5, B1 4-6, B0 6-8
    assert rank.host == {0: 0, 2: 8, 5: 0}
    assert rank.device == {0: 8, 2: 16, 3: 8, 4: 8 + 8 + 3, 6: 8 + 3, 8: 0}


def test_inputs_of_delayed_weight_gradients_are_held_until_their_w():
    split, whole = (
        over_time(f"0F0 0F1 0B0 0B1{more}", Costs.uniform(1), 100.0, saved=8.0, delayed=7.0)
        for more in (" 0W0 0W1", "")
    )
    assert split.device == {0: 108, 1: 116, 3: 115, 4: 114, 5: 107, 6: 100}
    assert whole.device_peak == 116.0


def test_what_is_recomputed_early_is_held_until_its_backward():
    costs = Costs.uniform(1, backward_s=3.0, recompute_s=1.0)
    rank = over_time("0F0 0F1 0R0 0B0 0B1", costs, saved=1.0, working=10.0, recomputed=40.0)
    # F0 0-1, F1 1-2, R0 2-3, B0 3-5; B1 recomputes one layer at a time, 5-8
    assert rank.device == {0: 1, 1: 2, 2: 42, 5: 11, 8: 0}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("schedule", "twice"), [("zb-h1", 1), ("zb-h2", 2)])
def test_zero_bubble_holds_what_the_paper_says(schedule, twice, ranks):
    # Qi et al., Sec. 2.3: (p - i + 1) M_B + (i - 1) M_W on worker i, which counts from 1; ZB-H2
    # (2 p - 2 i + 1) M_B + (2 i - 2) M_W.
    plan, costs = built(schedule, ranks, 1, 4 * ranks), Costs.uniform(ranks)
    footprint = Footprint(
        static_bytes=(0.0,) * ranks, saved_bytes=(8.0,) * ranks, delayed_bytes=(5.0,) * ranks
    )
    peaks = [rank.device_peak for rank in memory(simulate(plan, costs), footprint)]
    before = range(ranks)
    assert peaks == [(twice * (ranks - 1 - r) + 1) * 8.0 + twice * r * 5.0 for r in before]
    # The most of any rank is 1F1B's for the first of the two.
    one_f_one_b = memory(simulate(built("1f1b", ranks, 1, 4 * ranks), costs), footprint)
    assert (max(peaks) == one_f_one_b[0].device_peak) == (schedule == "zb-h1" or ranks == 1)


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in ONE_SEGMENT_SCHEDULES])
def test_the_peak_is_the_plans_count_of_activations(schedule):
    plan = built(schedule, 3, 2, 6)
    footprint = Footprint(static_bytes=(0.0,) * 3, saved_bytes=(1.0,) * 6)
    ranks = memory(simulate(plan, Costs.uniform(6)), footprint)
    assert tuple(rank.device_peak for rank in ranks) == peak_activations(plan)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.floats(0.0, 3.0))
def test_all_memory_is_given_back(ranks, segments, microbatches, copy_s):
    plan = add_offload(built("aiao", ranks, segments, microbatches))
    stages = ranks * segments
    costs = Costs(
        forward_s=(1.0,) * stages,
        backward_s=(2.0,) * stages,
        offload_s=(copy_s,) * stages,
        reload_s=(copy_s,) * stages,
    )
    footprint = Footprint(static_bytes=(5.0,) * ranks, saved_bytes=(1.0,) * stages)
    for rank in memory(simulate(plan, costs, iterations=2), footprint):
        assert [*rank.device.values()][-1] == 5.0
        assert [*rank.host.values()][-1] == 0.0
        assert min(rank.host.values()) >= 0.0
        assert all(first < second for first, second in pairwise(rank.device))


# Sizes


def test_activations_of_a_layer():
    shape = model_shape("gpt3-175b")  # s=2048, h=12288, a=96: 5 a s/h = 80
    sbh = 2048 * 12288
    assert layer_bytes(shape, Setup(), "none") == sbh * (34 + 80)
    assert layer_bytes(shape, Setup(), "selective") == sbh * 34
    split = Setup(tensor_parallel=8)
    assert layer_bytes(shape, split, "selective") == sbh * (10 + 24 / 8)
    both = Setup(tensor_parallel=8, sequence_parallel=True)
    assert layer_bytes(shape, both, "none") == sbh * (34 + 80) / 8
    assert layer_bytes(shape, both, "full") == sbh * 2 / 8


def test_inputs_and_output_gradients_of_a_layers_linears():
    shape = model_shape("gpt3-175b")
    sbh = 2048 * 12288
    # Inputs of h, h, h, 4h and output gradients of 3h, h, 4h, h, in 2 bytes each
    assert delayed_bytes(shape, Setup(), 96) == [32 * sbh] * 96
    # Split over 8 GPUs: outputs of 3h and 4h, inputs of h and 4h; with SP the two others of h
    eight = Setup(tensor_parallel=8, sequence_parallel=True)
    assert delayed_bytes(shape, eight, 96)[0] == sbh * (2 + 14 / 8) * 2
    assert delayed_bytes(shape, Setup(tensor_parallel=8), 96)[0] == sbh * (4 + 12 / 8) * 2
    assert delayed_bytes(shape, replace(eight, fp32=True), 48)[0] == sbh * (2 + 14 / 8) * 4 * 2


def test_each_expert_of_a_token_has_operands_of_its_own():
    shape = model_shape("mixtral-8x7b")
    assert delayed_bytes(shape, Setup(), 32) == [1888 * 2**20] * 32
    assert (
        delayed_bytes(replace(shape, num_experts=0, experts_per_token=0), Setup(), 32)
        == [1088 * 2**20] * 32
    )
    # Of tensor-parallel ranks, each has whole experts for its part of the tokens.
    shared = Setup(tensor_parallel=2, sequence_parallel=True, expert_parallel=2)
    halves, wholes = (
        delayed_bytes(shape, replace(shared, expert_tensor_parallel=size), 32)[0] for size in (2, 1)
    )
    assert halves - wholes == 8192 * 2 * 2 * 4096 * (1 - 1 / 2) * 2


def test_model_states_take_18_bytes_per_parameter_or_fewer():
    shape = model_shape("gpt3-18b")
    whole = sum(static_bytes(shape, Setup(), 1, 1))
    assert whole == 18 * shape.num_parameters
    sharded = Setup(tensor_parallel=8, data_parallel=4, distributed_optimizer=True)
    (held,) = held_parameters(shape, sharded, 1)
    assert sum(static_bytes(shape, sharded, 1, 1)) == (6 + 12 / 4) * held.dense


def test_messages_gradients_and_the_last_stage():
    shape, setup = model_shape("gpt3-18b"), Setup(tensor_parallel=8, sequence_parallel=True)
    assert message_bytes(shape, setup) == 1024 * 6144 * 2 / 8
    (held,) = held_parameters(shape, setup, 1)
    on_gpus = estimated(shape, "a100x8", setup)
    assert on_gpus.gradient_bytes == (4 * held.dense,)
    # Norms, positions and biases behind a sum are on all ranks.
    assert held.dense == pytest.approx(shape.num_parameters / 8, rel=5e-3)
    assert held.dense > shape.num_parameters / 8
    first, *_, last = saved_bytes(shape, setup, 8)
    assert last - first == 1024 * 51200 * 4 / 8  # the logits
    assert working_bytes(shape, setup, 8) == [0] * 8
    full = Setup(recompute="full")
    assert working_bytes(shape, full, (0, 40)) == [0, layer_bytes(shape, full, "none")]


def test_setups_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"28 is not divisible by tensor_parallel=8; .* is 7"):
        Setup(tensor_parallel=8).check(model_shape("t-nlg"))
    with pytest.raises(ValueError, match="found microbatch_size=0"):
        Setup(microbatch_size=0)


# Steady state


def test_the_steady_state_hides_what_fits_behind_the_next_forward():
    plan = deferred_grad_sync(built("aiao", 2, 2, 8))
    costs = Costs.uniform(4, grad_sync_s=20.0)
    timeline = steady_state(plan, costs, Link(grad_sync_order="edf"))
    alone = simulate(built("aiao", 2, 2, 8), costs).makespan_s
    # Segment 1's reduction (20) has 16 behind segment 0's backward; the rest follows segment 0's,
    # while its next forward runs: only segment 0's own is exposed.
    assert timeline.period_s == pytest.approx(alone + 20.0)


def test_without_deferred_work_all_iterations_are_equal():
    timeline = steady_state(built("1f1b", 3, 1, 4), Costs.uniform(3))
    assert timeline.iteration_ends_s(0) == (18.0, 36.0, 54.0)
