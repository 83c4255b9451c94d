"""The judge: how long an iteration of a choice takes, by simulation.

Training, the planner, `fold3d simulate` and ``--check`` ask it, each with its own costs: measured
times, numbers, or a model on a cluster.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Protocol

from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.choice import Choice, Segment
from megatron.fold3d.plan.compile import Features, lower, order_of
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.ops import WEIGHT_OPS
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes, placed_orders
from megatron.fold3d.policy.predicted import Predicted
from megatron.fold3d.predict.search.order_choice import stage_times
from megatron.fold3d.predict.search.simulated_shares import auto_shares, with_shares
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import PLAIN, Link
from megatron.fold3d.predict.simulator.simulate import steady_state

_order = lru_cache(maxsize=64)(order_of)


def plain_order(choice: Choice, num_ranks: int, num_microbatches: int) -> Plan:
    """Return the order of a choice, with weight gradients in their backwards."""
    named = replace(choice, segments=(Segment(),) * len(choice.segments))
    return _order(named, num_ranks, num_microbatches)


class Predicts(Protocol):
    """What a search asks: a `Judge`, or what has one for each of its choices."""

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of an iteration."""

    @property
    def gathers_params(self) -> bool:
        """Whether parameters are stepped in shards, and gathered."""

    def costs(self, choice: Choice) -> Costs:
        """Return the costs of the stages."""

    def plain_order(self, choice: Choice) -> Plan:
        """Return the order of a choice, with weight gradients in their backwards."""

    def predicted(self, choice: Choice) -> Predicted:
        """Return the prediction of a choice; its seconds are infinite if memory has no room.

        Raises:
            PlanError: it cannot run.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """An order of a choice, simulated.

    Attributes:
        order: the order of computation, with the weight gradients that fill gaps.
        plan: what ran.
        timeline: its iterations; the last one is steady.
        shares: by stage, the part of its sum that starts in its iteration; empty is all.
    """

    order: Plan
    plan: Plan
    timeline: Timeline
    shares: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """Of a steady iteration."""
        return self.timeline.period_s


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Predicts the iterations of choices.

    Attributes:
        num_ranks: pipeline ranks.
        num_microbatches: micro-batches of an iteration.
        costs: of the stages of a choice; with ``features.gathers_params``, of reduce-scatters and
            all-gathers.
        features: what the run has beside its choice.
        link: how links are shared.
        offload: which saved activations are offloaded to host memory.
        cuts_slices: whether DP.sync of a choice with slices is simulated in slices. Where streams
            share no queue these hold up nothing, and need not be.
        fits: tells whether memory has room for a choice and its plan.
        held: what ranks may hold of an order whose weight gradients fill gaps.
        order: takes the place of the order that a choice names, a file's for example.
    """

    num_ranks: int
    num_microbatches: int
    costs: Callable[[Choice], Costs]
    features: Features
    link: Link = PLAIN
    offload: OffloadChoice | None = None
    cuts_slices: bool = False
    fits: Callable[[Choice, Plan], bool] = lambda choice, plan: True
    held: Callable[[Plan], HeldSizes] = HeldSizes.counted
    order: Plan | None = None

    @property
    def gathers_params(self) -> bool:
        """Whether parameters are stepped in shards, and gathered."""
        return self.features.gathers_params

    def predicted(self, choice: Choice) -> Predicted:
        """Return the prediction of a choice; its seconds are infinite if memory has no room.

        Raises:
            PlanError: it cannot run.
        """
        found = [self._predicted(choice, order) for order in self.orders(choice)]
        return min(found, key=lambda one: one.seconds)

    def plain_order(self, choice: Choice) -> Plan:
        """Return the order of a choice, with weight gradients in their backwards."""
        return self.order or plain_order(choice, self.num_ranks, self.num_microbatches)

    def orders(self, choice: Choice) -> Iterator[Plan]:
        """Yield the order, or what it is with weight gradients in different gaps.

        If memory has no room for them, they stay in their backwards.

        Raises:
            PlanError: the costs have no time of weight gradients to place.
        """
        order = self.plain_order(choice)
        if not choice.fills_gaps or order.has(*WEIGHT_OPS):
            yield order
            return
        times = stage_times(self.costs(choice))
        try:
            yield from placed_orders(order, times, self.held(order))
        except PlanError:
            yield order

    def simulated(self, choice: Choice, order: Plan) -> Simulated:
        """Simulate a choice in an order of computation.

        Raises:
            PlanError: it cannot run.
        """
        return self._run(choice, order, self._whole(choice, order))

    def _whole(self, choice: Choice, order: Plan) -> Plan:
        whole = replace(choice, slices=None)
        return lower(order, whole, self.features, offload=self.offload)

    def _predicted(self, choice: Choice, order: Plan) -> Predicted:
        plan = self._whole(choice, order)
        if not self.fits(choice, plan):
            return Predicted(choice=choice, seconds=inf, order=order)
        found = self._run(choice, order, plan)
        return Predicted(choice=choice, seconds=found.seconds, order=order, shares=found.shares)

    def _run(self, choice: Choice, order: Plan, plan: Plan) -> Simulated:
        """Simulate a plan whose sums are whole; first find the shares, and cut the slices."""
        costs, link, shares = self.costs(choice), self.link, tuple[float, ...]()
        if not choice.carries:
            costs = _stepping_last(costs, self.num_ranks)
        else:
            shares = (choice.share or 0.0,) * plan.num_stages
            if choice.share is None:  # slices hold up nothing: shares as if nothing could
                alone = replace(link, device=None) if self.cuts_slices else link
                shares = auto_shares(plan, costs, alone)
        if self.cuts_slices:
            cut = replace(choice, slices=True)
            plan = lower(order, cut, self.features, shares=shares, offload=self.offload)
        elif choice.carries:
            plan = with_shares(plan, costs, shares)
        timeline = steady_state(plan, costs, link)
        return Simulated(order=order, plan=plan, timeline=timeline, shares=shares)


def num_actions(judge: Predicts, choice: Choice) -> int:
    """Return how many computations a prediction simulates, roughly."""
    order = judge.plain_order(choice)
    once = sum(map(len, order.programs))
    places = 3 * order.num_segments if choice.fills_gaps else 1
    return once * places * (4 if choice.carries else 1)


def _stepping_last(costs: Costs, num_ranks: int) -> Costs:
    """Charge the optimizer's step to the stages that end last, when all gradients are there."""
    if not (steps := costs.optimizer_s):
        return costs
    first = tuple(sum(steps[rank::num_ranks]) for rank in range(num_ranks))
    return replace(costs, optimizer_s=first + (0.0,) * (len(steps) - num_ranks))
