"""The judge: how long an iteration of a choice takes, by simulation.

Training, `fold3d simulate` and ``--check`` ask it, each with its own costs: measured times,
numbers, or a model on a cluster.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from megatron.fold3d.plan.choice import Choice, Segment
from megatron.fold3d.plan.compile import Features, lower, order_of
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.ops import WEIGHT_OPS
from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes, placed_orders
from megatron.fold3d.policy.predicted import Predicted
from megatron.fold3d.predict.search.order_choice import stage_times
from megatron.fold3d.predict.search.replicated_costs import with_replicated
from megatron.fold3d.predict.search.simulated_shares import auto_shares, with_shares
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.execution import PLAIN, Execution
from megatron.fold3d.predict.simulator.simulate import simulate
from megatron.fold3d.predict.simulator.steady import steady_state

_order = lru_cache(maxsize=64)(order_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Predicts the iterations of choices.

    Attributes:
        num_ranks: pipeline ranks.
        num_microbatches: micro-batches of an iteration.
        costs: of the stages; with ``features.gathers_params``, of reduce-scatters and all-gathers.
        features: what the run has beside its choice.
        execution: how links are shared.
        fits: tells whether memory has room for a choice and its plan.
        held: what ranks may hold of an order whose weight gradients fill gaps.
        order: takes the place of the order that a choice names, a file's for example.
    """

    num_ranks: int
    num_microbatches: int
    costs: Costs
    features: Features
    execution: Execution = PLAIN
    fits: Callable[[Choice, Plan], bool] = lambda choice, plan: True
    held: Callable[[Plan], HeldSizes] = HeldSizes.counted
    order: Plan | None = None

    def predicted(self, choice: Choice) -> Predicted:
        """Return the prediction of a choice; its seconds are infinite if memory has no room.

        Raises:
            PlanError: it cannot run.
        """
        found = [self._simulated(choice, order) for order in self._orders(choice)]
        return min(found, key=lambda one: one.seconds)

    def seconds(self, choice: Choice) -> float:
        """Return what an iteration takes; infinity if it cannot run, or memory has no room."""
        try:
            return self.predicted(choice).seconds
        except PlanError:
            return inf

    def num_actions(self, choice: Choice) -> int:
        """Return how many computations a prediction simulates, roughly."""
        order = self.plain_order(choice)
        once = sum(map(len, order.programs))
        places = 3 * order.num_segments if choice.fills_gaps else 1
        return once * places * (4 if choice.carries else 1)

    def plain_order(self, choice: Choice) -> Plan:
        """Return the order of a choice, with weight gradients in their backwards."""
        if self.order is not None:
            return self.order
        named = replace(choice, segments=(Segment(),) * len(choice.segments))
        return _order(named, self.num_ranks, self.num_microbatches)

    def _orders(self, choice: Choice) -> Iterator[Plan]:
        """Yield the order, or what it is with weight gradients in different gaps.

        If memory has no room for them, they stay in their backwards.

        Raises:
            PlanError: the costs have no time of weight gradients to place.
        """
        order = self.plain_order(choice)
        if not choice.fills_gaps or order.has(*WEIGHT_OPS):
            yield order
            return
        times = stage_times(self.costs)
        try:
            yield from placed_orders(order, times, self.held(order))
        except PlanError:
            yield order

    def _simulated(self, choice: Choice, order: Plan) -> Predicted:
        whole_sums = replace(choice, slices=None)  # slices hold up nothing
        plan, costs = lower(order, whole_sums, self.features), self.costs
        if not self.fits(choice, plan):
            return Predicted(choice=choice, seconds=inf, order=order)
        if self.features.gathers_params and (
            whole := choice.stages(self.num_ranks, optimizer="replicated")
        ):
            costs = with_replicated(costs, whole)
        if not choice.carries:
            seconds = simulate(plan, costs, self.execution).period_s
            return Predicted(choice=choice, seconds=seconds, order=order)
        shares: tuple[float, ...] = (choice.share or 0.0,) * plan.num_stages
        if choice.share is None:
            shares = auto_shares(plan, costs, self.execution)
        shared = with_shares(plan, costs, shares)
        seconds = steady_state(shared, costs, self.execution).period_s
        return Predicted(choice=choice, seconds=seconds, order=order, shares=shares)
