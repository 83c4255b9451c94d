"""The steady state: simulate iterations until one takes as long as the previous one."""

from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import PLAIN, Link
from megatron.fold3d.predict.simulator.simulate import simulate

TOLERANCE = 1e-6
FEWEST, MOST = 3, 24


def steady_state(plan: Plan, costs: Costs, link: Link = PLAIN) -> Timeline:
    """Simulate until iterations take equally long, so that the last one is steady.

    With work deferred into the next iteration, the first iterations differ. If they alternate
    without end, the simulation stops after `MOST` iterations.

    Args:
        plan: a plan with DP.sync; without it every iteration is steady.
        costs: the costs of the plan's stages.
        link: how the plan is run.
    """
    iterations = FEWEST
    while True:
        timeline = simulate(plan, costs, link, iterations=iterations)
        *_, before_s, start_s, end_s = (0.0, *timeline.iteration_ends_s(0))
        settled = abs((end_s - start_s) - (start_s - before_s)) <= TOLERANCE * (end_s - start_s)
        if settled or iterations >= MOST:
            return timeline
        iterations *= 2
