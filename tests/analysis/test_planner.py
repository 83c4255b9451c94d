from dataclasses import replace

import pytest

from megatron.fold3d.analysis.candidates import candidates
from megatron.fold3d.analysis.choices import WORTHWHILE
from megatron.fold3d.analysis.cluster import cluster
from megatron.fold3d.analysis.model import model_shape
from megatron.fold3d.analysis.planner import (
    USABLE_MEMORY,
    _bounded,
    _simulate,
    search,
)
from megatron.fold3d.plan.verify import peak_activations, verify

SMALL = model_shape("12-1024-16-512")
SLOW = cluster("a100x16-10g")
PAPER = replace(cluster("a100x128-200g"), task_overhead_s=5e-3)


@pytest.fixture(scope="module")
def all_small():
    """Every candidate of a small search, simulated."""
    everything = [_bounded(SMALL, SLOW, c) for c in candidates(SMALL, SLOW, 32)]
    return [(item, _simulate(item)) for item in everything]


def test_no_simulation_is_faster_than_its_bound(all_small):
    assert len(all_small) > 300
    for item, choice in all_small:
        assert choice.iteration_s >= item.bound_s * (1 - 1e-9), item.candidate


def test_every_candidate_is_a_plan_that_runs(all_small):
    for item, _ in all_small[::25]:
        verify(item.candidate.plan().select({"F", "B"}))


def test_activations_are_counted_as_the_plan_has_them(all_small):
    for item, _ in all_small:
        candidate, peaks = item.candidate, peak_activations(item.candidate.plan())
        bounds = tuple(map(candidate.most_activations, range(candidate.num_ranks)))
        if candidate.offload:
            assert all(peak <= bound for peak, bound in zip(peaks, bounds, strict=True))
        else:
            assert peaks == bounds


def test_the_search_finds_the_fastest_of_all(all_small):
    limit = SLOW.gpu_memory_bytes * USABLE_MEMORY
    fits = [choice for _, choice in all_small if choice.device_bytes <= limit]
    found = search(SMALL, SLOW, global_batch_size=32, top=3)
    assert found.best[0].iteration_s == min(choice.iteration_s for choice in fits)
    stock = min(choice.iteration_s for choice in fits if choice.candidate.is_stock)
    assert found.best_stock is not None
    assert found.best_stock.iteration_s == stock
    assert found.simulated < len(all_small) / 2


def test_on_a_fast_node_stock_is_as_good():
    found = search(model_shape("24-2048-16"), cluster("h100x8"), global_batch_size=64)
    assert found.best_stock is not None
    assert found.best_stock.iteration_s <= found.best[0].iteration_s * (1 + WORTHWHILE)


def test_on_the_papers_cluster_aiao_is_chosen():
    found = search(model_shape("gpt3-18b"), PAPER, global_batch_size=256)
    assert found.best_stock is not None
    assert found.best[0].candidate.schedule == "aiao"
    assert found.best[0].iteration_s * (1 + WORTHWHILE) < found.best_stock.iteration_s
    assert len(found.best) == 10


def test_39b_is_at_least_as_fast_as_with_the_papers_split():
    found = search(model_shape("gpt3-39b"), PAPER, global_batch_size=256)
    split = [
        _bounded(model_shape("gpt3-39b"), PAPER, c)
        for c in candidates(model_shape("gpt3-39b"), PAPER, 256)
        if (c.num_ranks, c.setup.data_parallel, c.setup.microbatch_size) == (4, 4, 4)
        and c.schedule == "aiao"
        and c.setup.recompute == "full"
    ]
    papers = min(_simulate(item).iteration_s for item in split)
    assert found.best[0].iteration_s <= papers


def test_progress_is_reported():
    seen = []
    search(SMALL, SLOW, global_batch_size=32, progress=lambda *counts: seen.append(counts))
    assert seen
    assert all(done <= of for done, of in seen)


def test_what_cannot_fit_is_refused_with_what_would():
    with pytest.raises(ValueError, match=r"gpt-1t does not fit on v100x8: .* try \d+ GPUs"):
        search(model_shape("gpt-1t"), cluster("v100x8"), global_batch_size=64)


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="found global_batch_size=0"):
        search(SMALL, cluster("a100x8"), global_batch_size=0)
