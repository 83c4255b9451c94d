"""What is drawn as a line is what a simulation of all micro-batches gives."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search import best_first
from megatron.fold3d.predict.search.best_first import BestFirst
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.many_microbatches import can_extrapolate, extrapolated, measures
from tests.predict.setups import candidate

pytestmark = pytest.mark.search

SMALL = model_shape("12-1024-16-512")
ONE_QUEUE = Setup(data_parallel=2, tensor_parallel=2, sequence_parallel=True)
REPLICAS = Setup(data_parallel=4)
SHARDED = Setup(data_parallel=4, distributed_optimizer=True)
AIAO = candidate("aiao", 3, 2, 130)
STOCK = replace(AIAO, choice=Choice.plain("stock", 1))
INTERLEAVED = AIAO.with_options(order="stock")
CASES = {
    "1f1b": STOCK,
    "1f1b, odd number": replace(STOCK, num_microbatches=131),
    "1f1b, deeper": replace(STOCK, num_ranks=4, num_microbatches=240),
    "interleaved": INTERLEAVED,
    "breadth-first": INTERLEAVED.with_options(group=130),
    "aiao": AIAO,
    "aiao, odd number": replace(AIAO, num_microbatches=131),
    "aiao, more forwards ahead": replace(AIAO.with_options(ahead=3), num_microbatches=150),
    "aiao, replicas": replace(AIAO, setup=REPLICAS),
    "aiao, DP.sync in both directions": replace(AIAO, setup=REPLICAS).changed(step="next"),
    "aiao, distributed optimizer": replace(AIAO, setup=SHARDED),
    "aiao, shards": replace(AIAO, setup=SHARDED, shards="weights"),
    "1f1b, one hardware queue": replace(STOCK, setup=ONE_QUEUE),
    "interleaved, one hardware queue": replace(INTERLEAVED, setup=ONE_QUEUE),
    "aiao, one hardware queue": replace(AIAO, setup=ONE_QUEUE),
    "aiao, pairs": replace(AIAO.with_options(pairs=True), setup=ONE_QUEUE, num_microbatches=202),
}


def on(name: str, candidate: Candidate) -> Estimate:
    setup, ranks = candidate.setup, candidate.num_ranks
    gpus = setup.data_parallel * setup.tensor_parallel * ranks
    return BestFirst(SMALL, cluster(name.format(gpus))).estimate(candidate)


def simulations(estimate: Estimate) -> tuple[list[int], Callable[[Candidate], Timeline]]:
    """Return what simulates, and the numbers of micro-batches that it was asked for."""
    numbers: list[int] = []

    def simulated(candidate: Candidate) -> Timeline:
        numbers.append(candidate.num_microbatches)
        return timeline_of(candidate, estimate)

    return numbers, simulated


def is_on_the_line(candidate: Candidate, network: str) -> bool:
    """Tell whether a line is drawn; if so, it ends where the simulation does."""
    estimate = on(network, candidate)
    numbers, simulated = simulations(estimate)
    line = extrapolated(candidate, estimate, simulated)
    if line is None:
        return False
    assert 3 * sum(numbers) <= candidate.num_microbatches
    whole = measures(timeline_of(candidate, estimate))
    assert line == pytest.approx(whole, rel=1e-9, abs=1e-9 * whole[0])
    return True


@pytest.mark.parametrize("network", ["a100x{}-400g", "a100x{}-5g"])
@pytest.mark.parametrize("name", CASES)
def test_a_line_ends_where_the_simulation_does(name, network):
    assert is_on_the_line(CASES[name], network)


def test_no_line_is_drawn_where_a_rank_uses_up_its_lead_first():
    # The first rank begins its second segment while the second one is still at its first.
    uneven = replace(AIAO, choice=Choice.plain("aiao", 2), layers=(2, 4, 5, 1))
    assert not is_on_the_line(uneven, "a100x{}-400g")


def test_no_line_is_drawn_from_few_micro_batches_or_where_something_may_be_full():
    few = replace(AIAO, num_microbatches=106)  # less than three times 10 + 12 + 14
    for other in (few, AIAO.changed(wgrad="gaps")):
        numbers, simulated = simulations(estimate := on("a100x{}", other))
        assert extrapolated(other, estimate, simulated) is None
        assert numbers == []


@pytest.mark.parametrize("slower", [0.1, 10.0])
def test_memory_is_on_the_line_if_copies_keep_up(slower, monkeypatch):
    offloaded = replace(AIAO, setup=Setup(recompute="full"), offload=True)
    item = BestFirst(SMALL, cluster("a100x2")).bounded(offloaded)
    costs = item.estimate.costs
    copy_s = tuple(slower * seconds for seconds in costs.forward_s)
    costs = replace(costs, offload_s=copy_s, reload_s=copy_s)
    item = replace(item, estimate=replace(item.estimate, costs=costs))
    assert can_extrapolate(offloaded, item.estimate) == (slower < 1)
    judged = best_first._simulated(item, 2**40)
    monkeypatch.setattr(best_first, "extrapolated", lambda *_: None)
    whole = best_first._simulated(item, 2**40)
    assert judged.iteration_s == pytest.approx(whole.iteration_s, rel=1e-9)
    assert judged.device_bytes == pytest.approx(whole.device_bytes, rel=1e-9)
    assert judged.host_bytes == pytest.approx(whole.host_bytes, rel=1e-9)
