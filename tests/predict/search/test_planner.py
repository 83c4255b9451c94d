import re
from dataclasses import replace
from functools import partial

import pytest

from megatron.fold3d.commands.training_flags import training_flags
from megatron.fold3d.observe.memory_curve import memory
from megatron.fold3d.plan.compile import lower
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.schedule_word import spelled
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.best_first import BestFirst
from megatron.fold3d.predict.search.bounds import exact_bytes
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.candidates import candidates, group_sizes
from megatron.fold3d.predict.search.neighbours import in_16_bits, neighbours, recomputed_and_paired
from megatron.fold3d.predict.search.planner import (
    _sharded_variants,
    _varied,
    search,
    strongest_stock,
)
from megatron.fold3d.predict.search.search_result import WORTHWHILE
from tests.predict.paper.published import A100, QUEUE_PER_STREAM
from tests.predict.setups import candidate, estimated

pytestmark = pytest.mark.search

SMALL = model_shape("12-1024-16-512")
SLOW = cluster("a100x16-10g")
LARGE_QUEUE_PER_STREAM = replace(QUEUE_PER_STREAM, gpu_memory_bytes=2**40)


@pytest.fixture(
    scope="module",
    params=[frozenset(), frozenset({"offload", "preemptive-comm", "delay-weight-grads"})],
)
def all_small(request):
    """Every candidate of a small search and some of their neighbours, simulated."""
    judge = BestFirst(SMALL, SLOW)
    given = {"keeps_scores": True}  # which recompute nothing, too
    all_ = [*candidates(SMALL, SLOW, 32, given, assumed=request.param)]
    chosen = all_[:: 5 + len(request.param)]
    chosen += [n for c in chosen[::20] for n in neighbours(c, SMALL.num_layers, request.param)]
    return [(item, judge.simulated(item)) for item in map(judge.bounded, chosen)]


def test_16_bits_are_named_only_where_they_gain():
    nodes = replace(SLOW, num_nodes=4, gpus_per_node=1)
    judge = BestFirst(SMALL, nodes)
    alone = candidate("stock", 1, 4, 16)
    twice = replace(alone, setup=Setup(data_parallel=2), num_ranks=2, num_microbatches=8)
    items = [judge.bounded(c) for c in (alone, twice, twice.with_options(order="aiao"))]
    stock, _, ours = (judge.simulated(item) for item in items)
    in_16 = partial(in_16_bits, tied=True)
    [rounded] = _varied(judge, (ours, stock), items, in_16)  # stock has no replicas
    assert not rounded.candidate.is_stock
    assert rounded.iteration_s < ours.iteration_s


def test_memory_is_that_of_the_simulated_iteration():
    uneven = model_shape("14-1024-16-512")  # stages of a rank differ in layers, and in the logits
    assumed = frozenset({"overlap-tensor-parallel"})
    judge = BestFirst(uneven, SLOW)
    chosen = list(candidates(uneven, SLOW, 48, assumed=assumed))[::37]
    chosen += [
        c.with_options(pairs=True)
        for c in chosen
        if c.setup.tensor_parallel > 1 and c.schedule == "aiao"
    ]
    bounds = 0
    for one in chosen:
        known = judge.estimate(one)
        ranks = memory(timeline_of(one, known), known.footprint)
        exact = max(rank.device_peak for rank in ranks)
        item = judge.bounded(one)
        assert judge.simulated(item).device_bytes == pytest.approx(exact, rel=1e-9)
        assert item.device_bytes >= exact * (1 - 1e-9)
        bounds += item.device_bytes > exact * (1 + 1e-9)
    assert bounds > len(chosen) / 10
    # What fits is never left out for its bound.
    for one in chosen:
        judge.limit_bytes = exact = exact_bytes(one, judge.estimate(one))
        assert judge.fits(judge.bounded(one))
        judge.limit_bytes = exact * 0.999
        assert not judge.fits(judge.bounded(one))


def test_preemption_is_tried_beside_what_runs_without_and_only_where_it_can_run():
    found = set(candidates(SMALL, SLOW, 32, assumed=frozenset({"preemptive-comm"})))
    preempting = [c for c in found if c.preemptive]
    assert {replace(c, preemptive=False) for c in preempting} <= found
    # Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1 for tensor parallelism.
    assert {c.setup.tensor_parallel for c in preempting} == {1}
    assert not any(c.is_stock or c.setup.data_parallel == 1 for c in preempting)


def test_shards_are_tried_where_memory_has_no_room_without():
    given = {"tensor_parallel": 1, "num_ranks": 2, "num_segments": 3, "recompute": "none"}
    tight = cluster("a100x8-10g")
    judge = BestFirst(SMALL, tight)
    all_ = [judge.bounded(c) for c in candidates(SMALL, tight, 32, given)]
    of_aiao = [
        b
        for b in all_
        if b.candidate.schedule == "aiao"
        and b.candidate.setup.distributed_optimizer
        and not b.candidate.choice.carries
        and b.candidate.setup.microbatch_size == 1
    ]
    [whole] = of_aiao
    sizes = {}
    for shards in ("weights", "gradients"):
        sharded = judge.bounded(replace(whole.candidate, shards=shards))
        sizes[shards] = exact_bytes(sharded.candidate, sharded.estimate)
        assert judge.best([sharded], 1)[0].iteration_s >= judge.best([whole], 1)[0].iteration_s
    whole = replace(whole, device_bytes=exact_bytes(whole.candidate, whole.estimate))
    assert sizes["gradients"] < sizes["weights"] < whole.device_bytes
    for limit, expected in ((whole.device_bytes, None), *((b, name) for name, b in sizes.items())):
        judge.limit_bytes = limit
        found = [*_sharded_variants([whole], judge)]
        assert [b.candidate.shards for b in found] == ([expected] if expected else [])
    judge.limit_bytes = min(sizes.values()) - 1
    assert not [*_sharded_variants([whole], judge)]
    flags = training_flags(SMALL, tight, replace(whole.candidate, shards="gradients"))
    assert "--overlap-param-gather --shard-segments gradients" in flags


def test_both_orders_of_ranks_are_tried():
    order = next(c for c in candidates(SMALL, SLOW, 32) if c.num_ranks == c.setup.data_parallel > 1)
    others = {n.setup.order: n for n in neighbours(order, SMALL.num_layers)}
    assert "--use-tp-pp-dp-mapping" in training_flags(SMALL, SLOW, others["tp-pp-dp"])
    assert "--use-tp-pp-dp-mapping" not in training_flags(SMALL, SLOW, order)


def test_stock_is_tried_unaligned_and_in_optimizer_instances():
    sharded = Setup(data_parallel=4, distributed_optimizer=True)
    stock = candidate("stock", 2, 2, 4, sharded)
    found = [
        (other.aligned, other.setup.optimizer_instances)
        for other in neighbours(stock, SMALL.num_layers)
        if other.aligned != stock.aligned or other.setup.optimizer_instances > 1
    ]
    assert found == [(False, 1), (False, 2)]
    late, early = stock.job, replace(stock, aligned=False).job
    assert (late.grad_sync, early.grad_sync) == ("aligned", "overlap")
    ours = stock.with_options(order="aiao")
    assert all(
        o.aligned and o.setup == sharded
        for o in neighbours(ours, SMALL.num_layers)
        if o.setup.order == sharded.order
    )


def test_no_simulation_is_faster_than_its_bounds_with_and_without_dp_sync(all_small):
    judge = BestFirst(SMALL, SLOW)
    assert len(all_small) > 300
    above = 0
    for item, choice in all_small:
        assert choice.iteration_s >= item.bound_s * (1 - 1e-9), item.candidate
        assert choice.iteration_s >= judge.at_least_s(item) * (1 - 1e-9), item.candidate
        above += judge.at_least_s(item) > item.bound_s
    assert above > len(all_small) / 5  # elsewhere DP.sync is the bound


def test_every_candidate_is_a_plan_that_runs(all_small):
    for item, _ in all_small[::25]:
        verify(lower(item.candidate.job, transfers=False).select({"F", "B", "W"}))


def test_activations_are_counted_as_the_plan_has_them(all_small):
    for item, _ in all_small:
        whole = item.candidate.changed(wgrad="backward")
        peaks = peak_activations(lower(whole.job, transfers=False))
        bounds = tuple(map(whole.most_activations, range(whole.num_ranks)))
        if whole.offload:
            assert all(peak <= bound for peak, bound in zip(peaks, bounds, strict=True))
        else:
            assert peaks == bounds, whole


def test_the_search_finds_the_fastest_of_all():
    judge = BestFirst(SMALL, SLOW)
    given = {"microbatch_size": 1, "recompute": "none"}
    all_ = list(candidates(SMALL, SLOW, 32, given))
    choices = [judge.simulated(judge.bounded(one)) for one in all_]
    fits = [choice for choice in choices if choice.device_bytes <= SLOW.usable_bytes]
    found = search(SMALL, SLOW, global_batch_size=32, top=3, given=given)
    assert found.best[0].iteration_s <= min(choice.iteration_s for choice in fits)
    stock = min(choice.iteration_s for choice in fits if choice.candidate.is_stock)
    assert found.best_stock is not None
    assert found.best_stock.iteration_s <= stock
    assert len(found.tried) < len(all_) / 2


def test_a_last_group_of_stock_has_a_micro_batch_for_each_rank():
    sizes = {(2, 5): [3, 5], (4, 7): [7], (4, 9): [5, 9], (4, 10): [5, 10], (4, 16): [4, 8, 16]}
    assert {each: group_sizes(*each) for each in sizes} == sizes


@pytest.mark.parametrize("size", [1, 2])
def test_the_strongest_stock_has_the_best_number_of_segments_with_the_best_group(size: int):
    shape, gpus = model_shape("31-4096-32"), cluster("a100x8")
    given = {"num_ranks": 2, "tensor_parallel": 2, "data_parallel": 2, "microbatch_size": size}
    stock = [c for c in candidates(shape, gpus, 20, given) if c.is_stock]
    strongest = strongest_stock(shape, gpus, stock[0])
    assert strongest is not None
    judge = BestFirst(shape, gpus)
    for c in stock:
        for group in group_sizes(2, c.num_microbatches) if c.num_segments > 1 else ():
            item = judge.bounded(c.with_options(group=group))
            if judge.fits(item):
                assert strongest.iteration_s <= judge.simulated(item).iteration_s


def test_stock_of_any_layout_is_as_fast_as_in_a_layout_that_gains_from_the_order_of_ranks():
    shape, gpus = model_shape("16-2048-16"), cluster("a100-80gx32-100g")
    given = {"num_ranks": 2, "tensor_parallel": 1, "microbatch_size": 4}
    alike = strongest_stock(shape, gpus, next(candidates(shape, gpus, 512, given)))
    found = search(shape, gpus, global_batch_size=512, top=1)
    assert alike is not None
    assert alike.candidate.setup.order == "tp-pp-dp"
    assert found.best_stock is not None
    assert found.best_stock.iteration_s <= alike.iteration_s


def test_sizes_given_to_the_search_stay_as_given():
    given = {"num_ranks": 2, "num_segments": 3, "microbatch_size": 1, "recompute": "full"}
    found = search(SMALL, SLOW, global_batch_size=32, given=given)
    assert len(found.best) == 10
    for c in (choice.candidate for choice in found.best):
        sizes = (c.num_ranks, c.num_segments, c.setup.microbatch_size, c.setup.recompute)
        assert sizes == tuple(given.values())


def test_layers_that_cannot_be_even_are_uneven():
    given = {"num_ranks": 4, "microbatch_size": 2, "recompute": "none"}
    found = search(model_shape("13-1024-16-512"), SLOW, global_batch_size=32, given=given)
    assert all(sum(choice.candidate.layers) == 13 for choice in found.best)


def test_the_best_rows_have_the_layers_that_make_them_fastest():
    given = {"num_ranks": 4, "num_segments": 1, "tensor_parallel": 1, "microbatch_size": 1}
    found = search(SMALL, SLOW, global_batch_size=64, top=1, given=given)
    assert found.best_stock is not None
    judge = BestFirst(SMALL, SLOW)
    for choice in (found.best[0], found.best_stock):
        layers = choice.candidate.layers
        assert sum(layers) == 12
        assert layers[-1] < max(layers)  # the head is on the last stage
        even = judge.bounded(replace(choice.candidate, layers=()))
        assert choice.iteration_s < judge.best([even], 1)[0].iteration_s


def test_on_the_papers_cluster_aiao_is_chosen():
    found = search(model_shape("gpt3-18b"), A100, global_batch_size=256, top=1)
    assert found.best_stock is not None
    assert found.best[0].candidate.schedule == "aiao"
    assert found.best[0].iteration_s * (1 + WORTHWHILE) < found.best_stock.iteration_s


def test_39b_gets_the_papers_split_if_each_stream_has_a_queue():
    given = {"microbatch_size": 4}  # the paper's, as is the split (Table II)
    found = search(
        model_shape("gpt3-39b"), QUEUE_PER_STREAM, global_batch_size=256, top=4, given=given
    )
    best = found.best[0].candidate
    sizes = (best.setup.data_parallel, best.num_ranks, best.setup.tensor_parallel)
    assert (best.schedule, sizes) == ("aiao", (4, 4, 8))
    assert best.shards == "off"  # as in the paper: memory has room
    assert found.best[0].limit == "DP.sync 12%"


def test_one_queue_costs_tensor_parallelism_time_and_nothing_else():
    given = {"microbatch_size": 4, "num_ranks": 4}
    for tp, slower in ((1, False), (8, True)):
        of_tp = given | {"tensor_parallel": tp}
        one, many = (
            search(model_shape("gpt3-18b"), each, global_batch_size=256, top=3, given=of_tp)
            for each in (replace(A100, gpu_memory_bytes=2**40), LARGE_QUEUE_PER_STREAM)
        )
        for found, best in ((one.best[0], many.best[0]), (one.best_stock, many.best_stock)):
            assert found is not None
            assert best is not None
            if slower:
                assert found.iteration_s > best.iteration_s
            else:
                assert found == best


@pytest.mark.parametrize(
    ("word", "is_sharded"), [("aiao", False), ("aiao:step=next", False), ("aiao", True)]
)
def test_one_queue_costs_a_few_percent_of_many(word: str, is_sharded: bool):
    setup = Setup(
        tensor_parallel=8,
        data_parallel=4,
        microbatch_size=4,
        sequence_parallel=True,
        distributed_optimizer=is_sharded,
    )
    known = estimated("gpt3-18b", A100, setup, 4, 5)
    chosen = candidate(word, 5, 4, 16, setup)
    one_s, many_s = (timeline_of(chosen, known, connections=n).period_s for n in (1, 32))
    assert many_s <= one_s < 1.06 * many_s


def test_progress_is_reported():
    seen = []
    given = {"num_ranks": 2, "microbatch_size": 2}
    search(
        SMALL, SLOW, global_batch_size=32, given=given, progress=lambda *counts: seen.append(counts)
    )
    assert seen
    assert all(done <= of for done, of in seen)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_ranks": 5}, r"found --pp 5, .* it can be 1, 2, 4, 8$"),
        ({"tensor_parallel": 8, "data_parallel": 4}, r"found --tp 8, .* it can be 1, 2, 4$"),
        ({"num_ranks": 4, "num_segments": 5}, r"found --segments 5, .* it can be 1, 3$"),
        ({"microbatch_size": 16}, r"found --micro-batch-size 16, .* 1, 2, 4, 8$"),
        ({"data_parallel": 3, "num_ranks": 3}, r"has --dp 3 --pp 3; give fewer sizes"),
        ({"batch": 0}, "found global_batch_size=0"),
    ],
)
def test_sizes_that_divide_nothing_are_refused_with_ones_that_do(given, message):
    given = {"batch": 32} | given
    with pytest.raises(ValueError, match=message):
        search(SMALL, SLOW, global_batch_size=given.pop("batch"), given=given)


def test_a_search_where_nothing_fits_names_what_would():
    shape, few = model_shape("gpt3-39b"), cluster("a100x32")
    with pytest.raises(ValueError, match="gpt3-39b does not fit on a100x32: ") as refused:
        search(shape, few, global_batch_size=64, given={"num_ranks": 1})
    sizes = re.search(r"try --tp (\d+) --pp (\d+) .* --recompute full$", str(refused.value))
    assert sizes is not None
    given = {"tensor_parallel": int(sizes[1]), "num_ranks": int(sizes[2]), "microbatch_size": 1}
    assert search(shape, few, global_batch_size=64, top=1, given=given).best


def test_a_model_that_is_too_large_for_a_cluster_gets_a_larger_one():
    with pytest.raises(ValueError, match=r"39b does not fit on v100x8: .* full on 32 GPUs$"):
        search(model_shape("gpt3-39b"), cluster("v100x8"), global_batch_size=64)


def test_offload_is_chosen_where_aiao_fits_in_no_other_way_and_the_host_has_room():
    given = {"num_ranks": 4, "num_segments": 3, "tensor_parallel": 1, "microbatch_size": 4}
    narrow = replace(SMALL, vocab_size=1024)  # or the logits fill what offloading leaves
    small = replace(SLOW, gpu_memory_bytes=0.6 * 2**30)
    found = search(narrow, small, global_batch_size=512, given=given)
    assert all(choice.candidate.offload for choice in found.best)
    assert 0 < found.best[0].host_bytes <= small.host_memory_bytes / small.gpus_per_node
    assert training_flags(SMALL, SLOW, found.best[0].candidate).endswith("--offload-activations on")

    usual = search(narrow, SLOW, global_batch_size=512, given=given)
    assert not any(choice.candidate.offload for choice in usual.best)
    full = replace(small, host_memory_bytes=2**30)
    with pytest.raises(ValueError, match="does not fit"):
        search(narrow, full, global_batch_size=512, given=given)


def test_a_search_leaves_shares_to_training():
    """On the testbed, whose runs agree: `scripts.bench.compare` in scripts/bench/LOG.md."""
    hosts = replace(cluster("testbedx4"), iteration_overhead_s=0.0945, ring_buffer_bytes=0)
    given = {"num_ranks": 2, "microbatch_size": 1, "fp32": True}
    best = search(model_shape("testbed"), hosts, global_batch_size=16, given=given).best
    first = best[0]
    assert str(first.candidate.choice) == "aiao:step=next"
    assert first.candidate.num_segments == 8
    assert not any(choice.candidate.choice.share for choice in best)


def test_weight_gradients_are_delayed_on_request_where_that_hides_dp_sync():
    hosts, given = cluster("testbedx4-0.35g"), {"num_ranks": 2, "num_segments": 4, "fp32": True}
    usual, tried = (
        search(model_shape("testbed"), hosts, global_batch_size=16, given=given, assumed=assumed)
        for assumed in (frozenset(), frozenset({"delay-weight-grads"}))
    )
    assert not any(choice.candidate.choice.splits for choice in usual.best)
    best = tried.best[0]
    delayed = best.candidate.choice.where(wgrad="last")
    assert delayed
    assert best.candidate.choice.carries
    assert best.candidate.choice.share is None
    assert best.iteration_s < usual.best[0].iteration_s / (1 + WORTHWHILE)
    assert f":step=next:wgrad=last@{spelled(delayed)} " in training_flags(
        SMALL, hosts, best.candidate
    )


@pytest.mark.parametrize(
    ("segments", "sets"), [(1, []), (2, [(1,)]), (3, [(2,), (1, 2)]), (8, [(7,), (4, 7), (3, 4)])]
)
def test_the_first_segments_weight_gradients_are_never_delayed(segments, sets):
    setup = Setup(data_parallel=2)
    share = candidate("aiao:step=next", segments, 2, 8, setup)
    assumed = frozenset({"delay-weight-grads"})
    found = [c.choice.where(wgrad="last") for c in neighbours(share, 16, assumed)]
    assert [delayed for delayed in found if delayed] == sets
    sharded = replace(setup, distributed_optimizer=True)
    without = replace(share.changed(step="end"), setup=sharded)
    assert [c for c in neighbours(without, 16, assumed) if c.choice.where(wgrad="last")] == [
        replace(share, setup=its).changed(delayed, wgrad="last")
        for delayed in sets
        for its in (without.setup, setup)
    ]
    alone = replace(share, setup=Setup())
    assert not any(c.choice.where(wgrad="last") for c in neighbours(alone, 16, assumed))


def test_early_recomputation_and_pairs_are_bounded_too():
    assumed = frozenset({"recompute-early", "overlap-tensor-parallel"})
    given = {"tensor_parallel": 2, "microbatch_size": 1, "recompute": "full"}
    judge = BestFirst(SMALL, SLOW)
    chosen = [
        other
        for one in list(candidates(SMALL, SLOW, 32, given))[::4]
        for other in recomputed_and_paired(one, assumed)
    ]
    kinds = {(bool(c.choice.where(recompute="early")), bool(c.choice.pairs)) for c in chosen}
    assert kinds == {(True, False), (False, True), (True, True)}
    for one in chosen:
        item = judge.bounded(one)
        choice = judge.simulated(item)
        assert choice.iteration_s >= item.bound_s * (1 - 1e-9), one
        assert choice.iteration_s >= judge.at_least_s(item) * (1 - 1e-9), one
        peaks = peak_activations(lower(one.job, transfers=False))
        assert peaks == tuple(map(one.most_activations, range(one.num_ranks)))


def test_pairs_are_proposed_where_they_hide_more_of_the_all_to_alls_than_they_cost():
    experts = replace(SMALL, num_experts=8, experts_per_token=4)
    sizes = {"num_ranks": 2, "num_segments": 2, "microbatch_size": 1, "tensor_parallel": 1}
    assumed = frozenset({"overlap-tensor-parallel"})
    for faster, recompute, is_paired, is_combined in (
        (1, "full", True, False),
        (1e6, "full", False, False),
        (1, "none", False, True),  # stock's own overlap, which refuses full recomputation
    ):
        given = sizes | {"expert_parallel": 2, "recompute": recompute}
        nodes = replace(
            SLOW,
            num_nodes=16,
            gpus_per_node=1,
            nic_bytes_per_s=SLOW.nic_bytes_per_s * faster,
            intra_bytes_per_s=SLOW.intra_bytes_per_s * faster,
        )
        found = search(experts, nodes, global_batch_size=128, given=given, assumed=assumed)
        best = found.best[0].candidate
        assert bool(best.choice.pairs) == is_paired
        assert ("pairs=on" in str(best.choice)) == is_paired
        assert best.combined == is_combined


def test_fewer_layers_are_recomputed_where_memory_allows_it():
    given = {"num_ranks": 2, "num_segments": 3, "tensor_parallel": 2, "microbatch_size": 2}
    tight = replace(SLOW, gpu_memory_bytes=1e9)  # all layers recomputed take 0.9e9
    plain, counted = (
        search(SMALL, tight, global_batch_size=64, given=given, assumed=assumed)
        for assumed in (frozenset(), frozenset({"recompute-layers"}))
    )
    best = counted.best[0]
    assert best.iteration_s < plain.best[0].iteration_s
    assert best.candidate.recompute_layers
    assert sum(best.candidate.recompute_layers) < SMALL.num_layers
    assert best.device_bytes <= tight.usable_bytes
    flags = training_flags(SMALL, tight, best.candidate)
    assert f"--recompute-layers {','.join(map(str, best.candidate.recompute_layers))}" in flags


def test_expert_and_context_sizes_are_searched_unless_they_are_given():
    free = {"tensor_parallel": 2}
    gpus, experts = cluster("h100x16"), model_shape("mixtral-8x7b")
    long = replace(model_shape("llama3-8b"), seq_length=32768)

    def sizes(shape: ModelShape, given: dict[str, int]) -> tuple[set[int], set[int]]:
        setups = [c.setup for c in candidates(shape, gpus, 64, given)]
        return {s.context_parallel for s in setups}, {s.expert_parallel for s in setups}

    assert sizes(experts, free)[1] == {1, 2, 4, 8}
    assert sizes(long, free) == ({1, 2, 4}, {1})
    assert sizes(long, free | {"context_parallel": 2}) == ({2}, {1})
    alone = free | {"context_parallel": 1, "expert_parallel": 1}
    assert sizes(experts, alone) == ({1}, {1})
