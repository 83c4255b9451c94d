"""What a predicted gain rests on."""

from megatron.fold3d.observe.exposure import Exposure
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidate_estimate import estimate_of
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.search_result import JudgedCandidate
from megatron.fold3d.predict.search.sensitivity import gains_if_off_by_half

SHAPE, SLOW = model_shape("12-1024-16-512"), cluster("a100x8-10g")
STOCK = Candidate(
    choice=Choice.plain("stock", 1),
    setup=Setup(data_parallel=2),
    num_ranks=4,
    num_microbatches=8,
)
OURS = Candidate(
    choice=Choice.plain("aiao", 1),
    setup=STOCK.setup,
    num_ranks=4,
    num_microbatches=8,
)


def judged(candidate: Candidate) -> JudgedCandidate:
    estimate = estimate_of(SHAPE, SLOW, candidate)
    seconds = timeline_of(candidate, estimate).period_s
    return JudgedCandidate(candidate, seconds, device_bytes=0.0, exposed=Exposure())


def test_a_gain_rests_on_blocking_sends_and_efficiencies():
    stock = judged(STOCK)
    cases = tuple(gains_if_off_by_half(SHAPE, SLOW, judged(OURS), stock))
    assert [case.assumption for case in cases] == [
        "stock waits half as long for its sends",
        "NICs achieve 32% instead of 65%",
        "NICs achieve 98% instead of 65%",
        "GPUs achieve 40% instead of 79%",
        "GPUs achieve 100% instead of 79%",
    ]
    assert "compare.sbatch" in cases[0].measure
    assert all("doctor --write-cluster" in case.measure for case in cases[1:])
    same = {case.assumption: case.gain for case in gains_if_off_by_half(SHAPE, SLOW, stock, stock)}
    assert {round(gain, 9) for name, gain in same.items() if "achieve" in name} == {0.0}
    assert same["stock waits half as long for its sends"] <= 0
