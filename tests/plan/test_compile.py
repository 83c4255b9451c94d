"""One recipe: what is simulated is what runs."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product

import pytest

from megatron.fold3d.observe.timeline import Lane
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.ops import P2P_OPS
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, planned, verified

RANKS, MICROBATCHES = 3, 6


def order(schedule: str) -> Plan:
    segments = 1 if schedule in ONE_SEGMENT_SCHEDULES else 2
    return built(schedule, RANKS, segments, MICROBATCHES)


def every_way() -> Iterator[Callable[..., Plan]]:
    weight_grads = ("wgrad=backward", "wgrad=last@0", "wgrad=last")
    shares = ({"gathers_params": True, "shares": (s,) * 2 * RANKS} for s in (0.0, 0.5, 0.9))
    ways = (
        *product(
            ({}, {"gathers_params": True}, {"shards": "weights"}),
            (None, OffloadChoice(), OffloadChoice(at_most=3, depth=2)),
        ),
        *product((*shares, {"shards": "gradients"}), (None,)),
    )
    for wgrad, step, (fields, offload) in product(weight_grads, ("end", "next"), ways):
        yield partial(planned, parts=f"{wgrad}:step={step}", offload=offload, **fields)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_simulated_plan_is_the_plan_that_runs_without_its_transfers(schedule: str):
    for made in every_way():
        runs = verified(made(order(schedule)))
        simulated = made(order(schedule), transfers=False)
        assert runs.select(frozenset(Op) - P2P_OPS) == simulated


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_simulation_sends_where_the_plan_that_runs_sends(schedule: str):
    for made in islice(every_way(), 0, None, 2):
        runs = made(order(schedule))
        simulated = made(order(schedule), transfers=False)
        costs = Costs.uniform(
            runs.num_stages, forward_s=1.0, backward_s=2.0, p2p_s=0.3, grad_sync_s=1.5
        )
        timelines = [simulate(plan, costs, iterations=2) for plan in (runs, simulated)]
        for rank in range(RANKS):
            one, other = (timeline.lane(rank, Lane.COMPUTE) for timeline in timelines)
            assert one == other


def test_an_order_that_has_an_action_keeps_it():
    for fields in ({"gathers_params": True}, {"shards": "weights"}, {"shards": "gradients"}):
        whole = planned(built("aiao", RANKS, 3, MICROBATCHES), "wgrad=last@0", **fields)
        assert planned(whole, "wgrad=last@0", **fields) == whole
