"""What a predicted gain rests on."""

from dataclasses import replace

from megatron.fold3d.observe.exposure import Exposure
from megatron.fold3d.predict.cost_model.cluster import Cluster, cluster
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.candidates import Candidate, estimate_of
from megatron.fold3d.predict.search.search_result import JudgedCandidate
from megatron.fold3d.predict.search.sensitivity import gains_if_off_by_half
from tests.predict.setups import candidate

SHAPE, SLOW = model_shape("12-1024-16-512"), cluster("a100x8-10g")
SHARED = "stock waits half as long for its sends (they then share links with other traffic)"
STOCK = candidate("stock", 1, 4, 8, Setup(data_parallel=2))
OURS = candidate("aiao", 1, 4, 8, STOCK.setup)


def judged(candidate: Candidate, nodes: Cluster = SLOW) -> JudgedCandidate:
    estimate = estimate_of(SHAPE, nodes, candidate)
    seconds = timeline_of(candidate, estimate).period_s
    return JudgedCandidate(candidate, seconds, device_bytes=0.0, exposed=Exposure())


def test_a_gain_rests_on_blocking_sends_and_efficiencies():
    stock = judged(STOCK)
    cases = tuple(gains_if_off_by_half(SHAPE, SLOW, judged(OURS), stock))
    assert [case.assumption for case in cases] == [
        "stock waits half as long for its sends",
        "NICs achieve 47% instead of 94%",
        "NICs achieve 100% instead of 94%",
        "GPUs achieve 40% instead of 79%",
        "GPUs achieve 100% instead of 79%",
    ]
    assert "compare.sbatch" in cases[0].measure
    assert all("doctor --write-cluster" in case.measure for case in cases[1:])
    same = {case.assumption: case.gain for case in gains_if_off_by_half(SHAPE, SLOW, stock, stock)}
    assert {round(gain, 9) for name, gain in same.items() if "achieve" in name} == {0.0}
    assert same["stock waits half as long for its sends"] <= 0


def test_sends_that_stock_does_not_wait_for_may_share_links_and_take_longer():
    nodes, many = cluster("a100x32-3g"), replace(STOCK.setup, data_parallel=8)
    stock, ours = (judged(replace(c, setup=many, num_microbatches=4), nodes) for c in (STOCK, OURS))
    case = next(gains_if_off_by_half(SHAPE, nodes, ours, stock))
    assert case.gain > stock.iteration_s / ours.iteration_s - 1
    assert case.assumption == SHARED
