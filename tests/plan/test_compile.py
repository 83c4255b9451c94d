"""One recipe: what is simulated is what runs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from megatron.fold3d.observe.timeline import Lane
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Features
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.ops import P2P_OPS
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES, build
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidate_timeline import plan_of
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.simulated_shares import with_shares
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
from megatron.fold3d.runtime.plans import Plans
from tests.configs import CONFIG
from tests.plans import planned, verified

RANKS, MICROBATCHES = 3, 6


def order(schedule: str) -> Plan:
    segments = 1 if schedule in ONE_SEGMENT_SCHEDULES else 2
    return build(schedule, num_ranks=RANKS, num_segments=segments, num_microbatches=MICROBATCHES)


def every_way() -> Iterator[Callable[..., Plan]]:
    for parts, (gathers, shards), offload in product(
        ("wgrad=backward", "wgrad=last@0", "step=next", "wgrad=last@0:step=next"),
        ((False, False), (True, False), (True, True)),
        (None, OffloadChoice(), OffloadChoice(at_most=3, depth=2)),
    ):
        yield partial(
            planned, parts=parts, gathers_params=gathers, shards_params=shards, offload=offload
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_simulated_plan_is_the_plan_that_runs_without_its_transfers(schedule: str):
    for made in every_way():
        runs = verified(made(order(schedule)))
        simulated = made(order(schedule), transfers=False)
        assert runs.select(frozenset(Op) - P2P_OPS) == simulated


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_simulation_sends_where_the_plan_that_runs_sends(schedule: str):
    for made in every_way():
        runs = made(order(schedule))
        simulated = made(order(schedule), transfers=False)
        costs = Costs.uniform(
            runs.num_stages,
            forward_s=1.0,
            backward_s=2.0,
            p2p_s=0.3,
            grad_sync_s=1.5,
        )
        timelines = [simulate(plan, costs, iterations=2) for plan in (runs, simulated)]
        for rank in range(RANKS):
            one, other = (timeline.lane(rank, Lane.COMPUTE) for timeline in timelines)
            assert one == other


@pytest.mark.parametrize("schedule", ["aiao", "interleaved"])
@pytest.mark.parametrize(
    ("share", "gathers"), [(None, False), (None, True), (0.5, False), (0.5, True)]
)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("delayed", [(), (0,)])
def test_the_planner_and_training_compile_one_plan(
    schedule: str, share: float | None, gathers: bool, offload: bool, delayed: tuple[int, ...]
):
    segments = order(schedule).num_segments
    choice = Choice.plain(schedule, segments, share=share).changed(delayed, wgrad="last")
    config = replace(
        CONFIG,
        choice=choice if share is None else choice.changed(step="next"),
        features=Features(gathers_params=gathers),
        num_ranks=RANKS,
        offload_activations="on" if offload else "off",
    )
    trained = Plans(config).training(MICROBATCHES)
    searched = plan_of(
        Candidate(
            choice=replace(config.choice, group=None),
            setup=Setup(data_parallel=2, distributed_optimizer=gathers),
            num_ranks=RANKS,
            num_microbatches=MICROBATCHES,
            offload=offload,
            preemptive=True,
        )
    )
    if share is not None:
        alike = replace(Costs.uniform(RANKS * segments, grad_sync_s=1.0), param_gather_s=())
        alike = replace(alike, param_gather_s=alike.grad_sync_s) if gathers else alike
        searched = with_shares(searched, alike, (share,) * searched.num_stages)
    assert trained.select(frozenset(Op) - P2P_OPS) == searched


def test_an_order_that_has_an_action_keeps_it():
    whole = planned(order("aiao"), "wgrad=last@0", gathers_params=True)
    assert planned(whole, "wgrad=last@0", gathers_params=True) == whole
