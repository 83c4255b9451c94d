from dataclasses import replace

import pytest

from megatron.fold3d.commands.training_flags import training_flags
from megatron.fold3d.observe.exposure import Exposure
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup, held_parameters
from megatron.fold3d.predict.search import best_first
from megatron.fold3d.predict.search.best_first import BestFirst
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.neighbours import with_replicated_segments
from megatron.fold3d.predict.search.planner import _plainest_first, search
from megatron.fold3d.predict.search.search_result import JudgedCandidate
from megatron.fold3d.predict.simulator.link import NO_SWITCHES
from tests.predict.setups import candidate

SMALL = model_shape("12-1024-16-512")
SLOW = cluster("a100x16-10g")
AIAO = candidate("aiao", 3, 2, 4, Setup(data_parallel=8, distributed_optimizer=True))


def judge(on=SLOW) -> BestFirst:
    return BestFirst(SMALL, on)


def test_tied_ends_are_replicated_together():
    def found(candidate: Candidate, *, tied: bool) -> list[tuple[int, ...]]:
        found = with_replicated_segments(candidate, tied=tied)
        return [c.choice.where(optimizer="replicated") for c in found]

    assert found(AIAO, tied=True) == [(1,), (0, 2), (0, 1, 2)]
    assert found(AIAO, tied=False) == [(0,), (1,), (2,), (0, 1, 2)]
    whole = replace(AIAO, setup=Setup(data_parallel=8))
    for other in (whole, replace(AIAO, shards="weights"), AIAO.with_options(order="stock")):
        assert found(other, tied=True) == []


def test_replicated_segments_are_reduced_for_longer_gathered_never_and_held_whole():
    replicated = AIAO.changed((1,), optimizer="replicated")
    sharded, found = judge().estimate(AIAO), judge().estimate(replicated)
    in_full = [i in (2, 3) for i in range(6)]
    assert found.costs.grad_sync_s == tuple(
        s * (1 + whole) for s, whole in zip(sharded.costs.grad_sync_s, in_full, strict=True)
    )
    assert found.costs.param_gather_s == tuple(
        0.0 if whole else s for s, whole in zip(sharded.costs.param_gather_s, in_full, strict=True)
    )
    held, others = held_parameters(SMALL, AIAO.setup, 6), 1 - 1 / AIAO.setup.num_replicas
    more = [held[stage].dense * others * AIAO.setup.optimizer_bytes for stage in (2, 3)]
    assert min(more) > 0
    assert [
        b - a
        for a, b in zip(sharded.footprint.static_bytes, found.footprint.static_bytes, strict=True)
    ] == pytest.approx(more)
    assert replicated.name == "aiao:optimizer=replicated@1"
    assert "--schedule aiao:optimizer=replicated@1 " in training_flags(SMALL, SLOW, replicated)


def test_no_simulation_of_replicated_segments_is_faster_than_its_bound():
    for each in with_replicated_segments(AIAO, tied=True):
        item = judge().bounded(each)
        simulated = judge().simulated(item)
        assert item.bound_s <= simulated.iteration_s * (1 + 1e-9)
        assert judge().at_least_s(item) <= simulated.iteration_s * (1 + 1e-9)


def test_splits_whose_nodes_differ_are_not_tried():
    pods = replace(SLOW, num_nodes=3, switch_nodes=(2,), oversubscription=(4.0,))
    odd = replace(AIAO, setup=replace(AIAO.setup, data_parallel=12))
    assert not judge(pods).can_place(odd)
    assert judge(replace(pods, num_nodes=4)).can_place(
        replace(AIAO, setup=replace(AIAO.setup, data_parallel=16))
    )


def test_switches_hold_up_messages_but_never_speed_them():
    pods = replace(SLOW, gpus_per_node=2, num_nodes=8, switch_nodes=(4,), oversubscription=(4.0,))
    equal = replace(pods, oversubscription=(1.0,))
    slower, same = (judge(on).estimate(AIAO) for on in (pods, equal))
    assert slower.costs == same.costs
    assert (bool(slower.routes.capacities), same.routes) == (True, NO_SWITCHES)
    seconds = [judge(on).simulated(judge(on).bounded(AIAO)).iteration_s for on in (pods, equal)]
    assert seconds[0] > seconds[1]


@pytest.mark.processes
@pytest.mark.search
def test_processes_beside_each_other_find_what_one_finds(monkeypatch):
    given = {"num_ranks": 2, "num_segments": 2, "tensor_parallel": 1, "microbatch_size": 1}
    alone = search(SMALL, SLOW, global_batch_size=32, given=given, top=3)
    monkeypatch.setattr(best_first, "MANY_GPUS", 1)
    together = search(SMALL, SLOW, global_batch_size=32, given=given, top=3)
    assert [c.iteration_s for c in together.best] == [c.iteration_s for c in alone.best]
    assert together.best_stock == alone.best_stock


def test_nothing_is_replicated_for_less_than_one_percent():
    def judged(candidate: Candidate, iteration_s: float) -> JudgedCandidate:
        nothing = Exposure()
        return JudgedCandidate(candidate, iteration_s, 0.0, nothing)

    plain, replicated = judged(AIAO, 1.005), judged(AIAO.changed((1,), optimizer="replicated"), 1.0)
    assert _plainest_first((replicated, plain)) == (plain, replicated)
    slower = judged(AIAO, 1.02)
    assert _plainest_first((replicated, slower)) == (replicated, slower)
