from dataclasses import replace

import pytest

from megatron.fold3d.observe.memory_curve import memory
from megatron.fold3d.plan.passes.grad_sync import serial_grad_sync
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup, held_parameters
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built
from tests.predict.paper.published import A100, SETUP_39B
from tests.predict.setups import estimated


def test_live_tensors_are_most_of_the_memory_that_the_paper_measured():
    # Table II: GPT-3 39B, (dp, pp, tp) = (4, 4, 8), 256 sequences, 29.8 GB.
    found = estimated("gpt3-39b", A100, SETUP_39B, 4, 2)
    plan = built("interleaved", 4, 2, 16)
    link = Link(nic_of_rank=found.nic_of_rank)
    timeline = simulate(serial_grad_sync(plan), found.costs, link)
    peak = max(rank.device_peak for rank in memory(timeline, found.footprint))
    # The rest is CUDA's and NCCL's own, and what the allocator cannot use.
    assert 0.75 * 29.8e9 < peak < 29.8e9


def test_a_backward_recomputes_its_layers_but_not_the_head():
    found = estimated("gpt3-39b", A100, SETUP_39B, 4, 2).costs
    overhead_s = A100.task_overhead_s
    for forward_s, backward_s, recompute_s in zip(
        found.forward_s, found.backward_s, found.recompute_s, strict=True
    ):
        assert backward_s - overhead_s == pytest.approx(2 * (forward_s - overhead_s) + recompute_s)
        assert recompute_s == pytest.approx(found.forward_s[0] - overhead_s)
    assert found.forward_s[-1] > found.forward_s[0]


def test_a_backward_that_recomputes_attention_scores_repeats_these_alone():
    shape = model_shape("gpt3-39b")
    scores, none = (
        estimated(shape, A100, replace(SETUP_39B, recompute=r), 4, 2).costs
        for r in ("selective", "none")
    )
    assert scores.recompute_s == ()
    again_s = 6 * shape.score_flops * SETUP_39B.microbatch_size
    again_s /= A100.gpu_flops_per_s * A100.compute_efficiency * SETUP_39B.tensor_parallel
    for more_s, less_s in zip(scores.backward_s, none.backward_s, strict=True):
        assert more_s - less_s == pytest.approx(again_s)


def test_weight_gradients_take_a_forward_without_its_attention_scores():
    shape, plain = model_shape("gpt3-39b"), replace(SETUP_39B, recompute="none")
    found = estimated(shape, A100, plain, 4, 2).costs
    full = estimated(shape, A100, SETUP_39B, 4, 2).costs
    assert full.weight_s == found.weight_s
    assert full.split_s == A100.task_overhead_s
    h, s, layers = 8192, 1024, 6
    rate = A100.gpu_flops_per_s * A100.compute_efficiency * 8
    assert found.weight_s == (pytest.approx(4 * layers * 24 * s * h * h / rate),) * 8


def test_one_replica_carries_what_its_node_sends():
    small = replace(SETUP_39B, tensor_parallel=4, data_parallel=16)
    four = estimated("gpt3-18b", A100, small, 2)
    eight = estimated("gpt3-18b", A100, replace(SETUP_39B, data_parallel=8), 2)
    assert four.costs.p2p_s == pytest.approx(2 * eight.costs.p2p_s)  # two replicas per node
    assert not eight.costs.grad_sync_local


def test_a_group_inside_a_node_leaves_the_nic_alone():
    node = cluster("a100x8")
    setup = Setup(tensor_parallel=2, data_parallel=2)
    found = estimated("24-2048-16", node, setup, 2)
    assert found.nic_of_rank == (0, 0)
    assert found.costs.grad_sync_local
    # 4-byte gradients of half the model, all-reduced by two GPUs: their size once over NVLink
    bytes_sent = found.costs.grad_sync_s[0] * node.intra_bytes_per_s
    held, _ = held_parameters(model_shape("24-2048-16"), setup, 2)
    assert bytes_sent == pytest.approx(4 * held.dense)


@pytest.mark.parametrize(("tensor", "factor"), [(8, 1), (4, 4), (1, 4)])
def test_rings_with_several_gpus_of_a_node_go_through_one_of_its_nics(tensor, factor):
    setup = Setup(tensor_parallel=tensor, data_parallel=32 // tensor)
    together, apart = (
        estimated("gpt3-18b", cluster(f"a100x32-{rate}g"), setup).costs for rate in ("800", "4x200")
    )
    assert apart.grad_sync_s[0] == pytest.approx(factor * together.grad_sync_s[0])
    assert apart.p2p_s == together.p2p_s


def test_trees_between_two_nodes_send_an_all_reduce_once():
    shape, setup = model_shape("gpt3-18b"), Setup(tensor_parallel=16)
    ring = replace(setup, sequence_parallel=True)
    tree_s, ring_s = (
        estimated(shape, "a100x16", each).costs.tp_sync_s[0] for each in (setup, ring)
    )
    assert tree_s == pytest.approx(ring_s * 16 / 15 / 2)


def test_gradients_of_16_bits_take_half_the_memory_and_half_the_time():
    shape, large = model_shape("gpt3-18b"), replace(SETUP_39B, distributed_optimizer=True)
    of_32, of_16 = (
        estimated(shape, A100, setup, 4, 2)
        for setup in (large, replace(large, small_gradients=True))
    )
    assert of_16.gradient_bytes == tuple(size / 2 for size in of_32.gradient_bytes)
    assert of_16.costs.grad_sync_s == pytest.approx([s / 2 for s in of_32.costs.grad_sync_s])
    assert of_16.costs.reduced_in_iteration_s[0] == of_32.costs.reduced_in_iteration_s[0] / 2
    assert of_16.costs.param_gather_s == pytest.approx(of_32.costs.param_gather_s)
    less = [
        b - a
        for a, b in zip(of_16.footprint.static_bytes, of_32.footprint.static_bytes, strict=True)
    ]
    assert less == pytest.approx([sum(of_16.gradient_bytes[rank::4]) for rank in range(4)])
    with pytest.raises(ValueError, match="gradients of 16 bits with weights of 32"):
        Setup(fp32=True, small_gradients=True)


def test_sums_of_32_bits_take_memory_and_no_bytes_but_where_replicas_share_a_node():
    rounded = replace(SETUP_39B, distributed_optimizer=True, small_gradients=True)
    exact = replace(rounded, accumulates_in_fp32=True, scatters_in_fp32=True)
    for tp, dp, times in ((8, 4, 1), (4, 8, 2 * (8 - 2) / (8 - 1))):
        less, more = (
            estimated("gpt3-18b", A100, replace(setup, tensor_parallel=tp, data_parallel=dp), 4)
            for setup in (rounded, exact)
        )
        assert more.gradient_bytes == less.gradient_bytes
        late = zip(more.costs.grad_sync_s, less.costs.grad_sync_s, strict=True)
        assert all(longer == pytest.approx(times * short) for longer, short in late)
        held = zip(more.footprint.static_bytes, less.footprint.static_bytes, strict=True)
        extra = [a - b for a, b in held]  # 4 bytes of local sums, 2 of what an all-to-all brings
        assert extra == pytest.approx([3 * size for size in less.gradient_bytes])
    with pytest.raises(ValueError, match="give --grad-reduce-in-bf16, or drop --ddp-param-name"):
        Setup(accumulates_in_fp32=True)


def test_dp_sync_of_39b_is_the_papers_once_its_gradients_have_16_bits():
    # Table II: 1.9768 s, by a Megatron that sums fp16 gradients as they are. Nothing is fitted:
    # 200 Gb/s, of which NICs achieve the default. Sums of 32 bits would take 3.66 s.
    setup = replace(SETUP_39B, small_gradients=True)
    found = estimated("gpt3-39b", "a100x128-200g", setup, 4)
    assert max(found.costs.grad_sync_s) == pytest.approx(1.9768, rel=0.1)


def test_the_distributed_optimizer_moves_fewer_bytes():
    plain = estimated("gpt3-18b", A100, SETUP_39B, 4, 2).costs
    sharded = replace(SETUP_39B, distributed_optimizer=True)
    spread = estimated("gpt3-18b", A100, sharded, 4, 2).costs
    assert spread.grad_sync_s[0] == pytest.approx(plain.grad_sync_s[0] / 2)
    assert spread.param_gather_s[0] == pytest.approx(plain.grad_sync_s[0] / 4)  # of 16 bits
    assert plain.param_gather_s[0] == 0


def test_optimizer_instances_gather_among_neighbours_and_sum_shards_over_instances():
    shape, nodes = model_shape("12-1024-16-512"), cluster("a100x16-100g")
    one = Setup(data_parallel=16, distributed_optimizer=True)
    two = replace(one, optimizer_instances=2)
    whole, halves = (estimated(shape, nodes, s) for s in (one, two))
    size, near = halves.gradient_bytes[0], nodes.intra_bytes_per_s
    # Eight GPUs of a node share its NICs: each sends its shard, an eighth, to the other node.
    far = nodes.goodput_bytes_per_s / 8
    assert halves.costs.grad_sync_s[0] == pytest.approx(7 / 8 * size / near + size / 8 / far)
    assert halves.costs.param_gather_s[0] == pytest.approx(7 / 8 * size / 2 / near)
    assert whole.costs.param_gather_s[0] > 5 * halves.costs.param_gather_s[0]
    more = halves.footprint.static_bytes[0] - whole.footprint.static_bytes[0]
    assert more == pytest.approx(12 * size / 4 / 16)  # Adam's 12 bytes of another 16th
    with pytest.raises(ValueError, match="16 replicas are not divisible by optimizer_instances=3"):
        estimated(shape, nodes, replace(one, optimizer_instances=3))


def test_layers_may_be_spread_unevenly():
    shape, layers = model_shape("gpt3-18b"), (6, *(5,) * 6, 4)
    even = estimated(shape, A100, SETUP_39B, 4, 2).costs.forward_s
    found = estimated(shape, A100, SETUP_39B, 4, 2, layers=layers)
    layer_s = (found.costs.forward_s[0] - even[0], even[7] - found.costs.forward_s[7])
    assert layer_s[0] == pytest.approx(layer_s[1])
    assert found.costs.forward_s[1:7] == even[1:7]
    with pytest.raises(ValueError, match="found 41 layers in 8 stages; the model has 40"):
        estimated(shape, A100, SETUP_39B, 4, 2, layers=(7, *layers[1:]))


def test_tied_word_embeddings_are_reduced_in_the_iteration_and_untied_ones_are_not():
    shape = model_shape("gpt3-18b")
    tied, untied = (
        estimated(s, A100, SETUP_39B, 4, 2).costs for s in (shape, replace(shape, untied=True))
    )
    assert untied.reduced_in_iteration_s == (0.0,) * 8
    assert tied.reduced_in_iteration_s[1:7] == (0.0,) * 6
    share = shape.embedding_parameters / 8 / held_parameters(shape, SETUP_39B, 8)[0].dense
    assert tied.reduced_in_iteration_s[0] == pytest.approx(tied.grad_sync_s[0] * share)


def test_an_iterations_overhead_is_spread_over_a_ranks_stages():
    slow = replace(A100, iteration_overhead_s=0.5)
    steps = estimated("gpt3-18b", slow, SETUP_39B, 4, 2).costs
    for rank in range(4):
        assert sum(steps.optimizer_s[rank::4]) == pytest.approx(0.5)


def test_gpus_must_be_those_of_the_cluster():
    with pytest.raises(ValueError, match=r"x 2 pipeline ranks are 64 GPUs; a100x128-200g has 128"):
        estimated("gpt3-18b", A100, SETUP_39B, 2, 2)


def test_grad_sync_inside_the_node_does_not_wait_for_messages():
    found = estimated("24-2048-16", "a100x8", Setup(data_parallel=4), 2)
    plan = serial_grad_sync(built("1f1b", 2, 1, 2))
    slow = replace(found.costs, p2p_s=1.0)
    apart = simulate(plan, slow)
    last = [span for span in apart.ranks[1] if span.lane == "grad_sync"]
    assert last[0].duration_s == pytest.approx(found.costs.grad_sync_s[1])


def test_ranks_that_share_experts_send_tokens_twice_and_hold_few_experts():
    shape, gpus = model_shape("mixtral-8x7b"), cluster("h100x16")
    alone = Setup(data_parallel=8)
    shared = replace(alone, expert_parallel=8)
    without, found = (estimated(shape, gpus, setup, 2) for setup in (alone, shared))
    h, tokens, layers = 4096, 8192, 16
    of_layer_s = 2 * (tokens * 2 * h * 2) * 7 / 8 / gpus.intra_bytes_per_s  # each goes to two
    for name in ("forward_s", "backward_s"):
        more_s = getattr(found.costs, name)[0] - getattr(without.costs, name)[0]
        assert more_s == pytest.approx(layers * of_layer_s)
    experts = layers * 8 * 3 * h * 14336
    dense = shape.stage_parameters(2)[0].total - experts
    assert found.footprint.static_bytes[0] == pytest.approx(18 * (dense + experts / 8))
    assert found.gradient_bytes[0] == pytest.approx(4 * (dense + experts / 8))
    all_reduce_s = 2 * 7 / 8 * 4 * dense / gpus.intra_bytes_per_s  # no other rank has its experts
    assert found.costs.grad_sync_s[0] == pytest.approx(all_reduce_s)


def test_all_gpus_of_a_node_share_its_nics_for_tokens_of_experts_elsewhere():
    shape, gpus = model_shape("mixtral-8x7b"), cluster("a100x16")
    setup = Setup(data_parallel=16, expert_parallel=8)
    inside = estimated(shape, gpus, setup).costs
    wide = replace(shape, num_experts=16)
    across = estimated(wide, gpus, replace(setup, expert_parallel=16))
    sent = 32 * 2 * (8192 * 2 * 4096 * 2)  # with what stays at home; all layers, there and back
    assert inside.ep_sync_s[0] == pytest.approx(sent * 7 / 8 / gpus.intra_bytes_per_s)
    elsewhere_s = sent / 2 * 8 / gpus.goodput_bytes_per_s
    assert across.costs.ep_sync_s[0] == pytest.approx(elsewhere_s)
    assert across.costs.collectives == inside.collectives == (64,)


def test_a_backward_that_recomputes_sends_tokens_again():
    shape, gpus = model_shape("mixtral-8x7b"), cluster("h100x16")
    setup = Setup(data_parallel=8, expert_parallel=8)
    kept, again = (
        estimated(shape, gpus, replace(setup, recompute=how), 2).costs for how in ("none", "full")
    )
    assert again.backward_s[0] == pytest.approx(kept.backward_s[0] + again.recompute_s[0])
    assert again.recompute_s[0] > again.ep_sync_s[0] == kept.ep_sync_s[0] > 0


def test_ranks_that_share_a_sequence_compute_a_part_and_pass_keys_and_values_on():
    shape, gpus = model_shape("llama3-8b"), replace(cluster("h100x8"), memory_bytes_per_s=0.0)
    found = estimated(shape, gpus, Setup(data_parallel=2, context_parallel=2), 2)
    whole = estimated(shape, gpus, Setup(data_parallel=4), 2)
    ring_s = 16 * (2 * 8 * 128) * 4096 * 2 / gpus.intra_bytes_per_s
    assert found.costs.forward_s[0] == pytest.approx(whole.costs.forward_s[0] / 2 + ring_s)
    assert found.costs.backward_s[0] == pytest.approx(whole.costs.backward_s[0] / 2 + 2 * ring_s)
    assert found.costs.p2p_local_s == whole.costs.p2p_local_s / 2
    assert found.footprint.saved_bytes[0] == whole.footprint.saved_bytes[0] / 2
    assert found.costs.grad_sync_s == whole.costs.grad_sync_s  # four GPUs have the parameters
    assert (found.cuda_connections, whole.cuda_connections) == (1, None)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"expert_parallel": 3}, "num_experts=8 is not divisible by expert_parallel=3"),
        ({"expert_parallel": 8}, "data_parallel=4 x context_parallel=1 is not divisible by"),
        ({"context_parallel": 3}, "seq_length=8192 is not divisible by twice context_parallel=3"),
    ],
)
def test_what_is_shared_divides(sizes, message):
    setup = Setup(data_parallel=4, **sizes)
    with pytest.raises(ValueError, match=message):
        estimated("mixtral-8x7b", A100, setup)


def test_pipeline_ranks_next_to_each_other_take_pp_sync_off_the_nic_and_dp_sync_onto_it():
    nodes = cluster("a100x16-200g")
    setup = Setup(tensor_parallel=2, data_parallel=4)
    default = estimated("24-2048-16", nodes, setup, 2)
    found = estimated("24-2048-16", nodes, replace(setup, order="tp-pp-dp"), 2)
    assert (default.nic_of_rank, found.nic_of_rank) == ((0, 1), (0, 0))
    assert default.costs.grad_sync_local
    assert not found.costs.grad_sync_local
    # Two rings of each rank cross the NIC at once (AxoNN eq. 10); the other rank's share it when
    # they use it at the same time.
    size = found.gradient_bytes[0]
    ring_s = 2 * 3 / 4 * size / (nodes.goodput_bytes_per_s / 2)
    assert found.costs.grad_sync_s[0] == pytest.approx(ring_s)
    assert found.costs.forward_s == default.costs.forward_s


def test_in_a_pipeline_over_several_nodes_a_boundary_carries_one_tensor_parallel_group():
    nodes = cluster("a100x32-200g")
    setup = Setup(tensor_parallel=2, data_parallel=2, order="tp-pp-dp")
    found = estimated("24-2048-16", nodes, setup, 8)
    assert found.nic_of_rank == (0, 0, 0, 0, 1, 1, 1, 1)
    default = estimated("24-2048-16", nodes, replace(setup, order="tp-dp-pp"), 8)
    assert default.costs.p2p_s == pytest.approx(2 * found.costs.p2p_s)
