"""The judge: how long an iteration of a choice takes, by simulation.

Training, the planner, `fold3d simulate` and ``--check`` ask it, each with its own costs: measured
times, numbers, or a model on a cluster.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.choice import Choice, Segment
from megatron.fold3d.plan.compile import Features, lower, order_of
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.ops import WEIGHT_OPS
from megatron.fold3d.plan.passes.combined import one_more_ahead
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes, StageTimes, placed_orders
from megatron.fold3d.policy.predicted import Predicted
from megatron.fold3d.predict.search.simulated_shares import auto_shares, with_shares
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import PLAIN, Link
from megatron.fold3d.predict.simulator.simulate import steady_state


def plain_order(
    choice: Choice, num_ranks: int, num_microbatches: int, *, combined: bool = False
) -> Plan:
    """Return the order of a choice, with weight gradients in their backwards.

    Args:
        choice: the choice; what its segments do changes no order.
        num_ranks: pipeline ranks.
        num_microbatches: micro-batches of an iteration.
        combined: as in `Link`.
    """
    named = replace(choice, segments=(Segment(),) * len(choice.segments))
    return _order(named, num_ranks, num_microbatches, combined)


@lru_cache(maxsize=64)
def _order(choice: Choice, num_ranks: int, num_microbatches: int, combined: bool) -> Plan:
    order = order_of(choice, num_ranks, num_microbatches)
    return one_more_ahead(order) if combined else order


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
    """Predicts the iterations of a choice.

    Attributes:
        choice: the choice.
        num_ranks: pipeline ranks.
        num_microbatches: micro-batches of an iteration.
        costs: of its stages; with ``features.gathers_params``, of reduce-scatters and all-gathers.
        features: what the run has beside its choice.
        may_receive_early: whether the run may post its receives early instead of late.
        link: how links are shared.
        offload: which saved activations are offloaded to host memory.
        cuts_slices: whether DP.sync of a choice with slices is simulated in slices. Where streams
            share no queue these hold up nothing, and need not be.
        has_room: tells whether memory has room for a plan; without room it is not simulated.
        fits: tells whether memory had room for iterations; those that fit go first.
        held: what ranks may hold of an order whose weight gradients fill gaps.
        order: takes the place of the order that the choice names, a file's for example.
    """

    choice: Choice
    num_ranks: int
    num_microbatches: int
    costs: Costs
    features: Features
    may_receive_early: bool = False
    link: Link = PLAIN
    offload: OffloadChoice | None = None
    cuts_slices: bool = False
    has_room: Callable[[Plan], bool] = lambda plan: True
    fits: Callable[[Simulated], bool] = lambda found: True
    held: Callable[[Plan], HeldSizes] = HeldSizes.counted
    order: Plan | None = None

    @property
    def plain_order(self) -> Plan:
        """The order of the choice, with weight gradients in their backwards."""
        return self.order or plain_order(
            self.choice, self.num_ranks, self.num_microbatches, combined=self.link.combined
        )

    @property
    def num_actions(self) -> int:
        """How many computations a prediction simulates, roughly."""
        order = self.plain_order
        once = sum(map(len, order.programs))
        places = 3 * order.num_segments if self.choice.fills_gaps else 1
        return once * places * (4 if self.choice.carries else 1)

    def predicted(self) -> Predicted:
        """Return the prediction; its seconds are infinite if memory has no room.

        Raises:
            PlanError: the choice cannot run.
        """
        if (found := self._fastest()) is None:
            order = next(self._orders())
            return Predicted(choice=self.choice, seconds=inf, order=order)
        seconds = found.seconds if self.fits(found) else inf
        return Predicted(
            choice=self.choice, seconds=seconds, order=found.order, shares=found.shares
        )

    def simulated(self) -> Simulated:
        """Return the fastest iterations, with weight gradients in any of the gaps.

        Raises:
            PlanError: the choice cannot run, or memory has no room.
        """
        if (found := self._fastest()) is None:
            raise PlanError(f"{self.choice}: memory has no room for it")
        return found

    def _fastest(self) -> Simulated | None:
        ways = [self.features]
        if self.may_receive_early and self.features.receives_late:
            ways.append(replace(self.features, receives_late=False))
        whole = replace(self.choice, slices=None)
        plans = [
            (order, lower(order, whole, way, offload=self.offload), way)
            for way in ways
            for order in self._orders()
        ]
        found = [self._run(*each) for each in plans if self.has_room(each[1])]
        if len(found) == 1:  # reading a long timeline takes time
            return found[0]
        return min(found, key=lambda one: (not self.fits(one), one.seconds), default=None)

    def _orders(self) -> Iterator[Plan]:
        """Yield the order, or what it is with weight gradients in different gaps.

        If memory has no room for them, they stay in their backwards.

        Raises:
            PlanError: the costs have no time of weight gradients to place.
        """
        order = self.plain_order
        if not self.choice.fills_gaps or order.has(*WEIGHT_OPS):
            yield order
            return
        times = stage_times(self.costs)
        try:
            yield from placed_orders(order, times, self.held(order))
        except PlanError:
            yield order

    def _run(self, order: Plan, plan: Plan, features: Features) -> Simulated:
        """Simulate a plan whose sums are whole; first find the shares, and cut the slices."""
        choice, costs, link, shares = self.choice, self.costs, self.link, tuple[float, ...]()
        if not choice.carries:
            costs = _stepping_last(costs, self.num_ranks)
        else:
            shares = (choice.share or 0.0,) * plan.num_stages
            if choice.share is None:  # slices hold up nothing: shares as if nothing could
                alone = replace(link, device=None) if self.cuts_slices else link
                shares = auto_shares(plan, costs, alone)
        if self.cuts_slices:
            cut = replace(choice, slices=True)
            plan = lower(order, cut, features, shares=shares, offload=self.offload)
        elif choice.carries:
            plan = with_shares(plan, costs, shares)
        timeline = steady_state(plan, costs, link)
        return Simulated(order=order, plan=plan, timeline=timeline, shares=shares)


def _stepping_last(costs: Costs, num_ranks: int) -> Costs:
    """Charge the optimizer's step to the stages that end last, when all gradients are there."""
    if not (steps := costs.optimizer_s):
        return costs
    first = tuple(sum(steps[rank::num_ranks]) for rank in range(num_ranks))
    return replace(costs, optimizer_s=first + (0.0,) * (len(steps) - num_ranks))


def stage_times(costs: Costs) -> StageTimes:
    """Return the times that the placement of weight gradients needs.

    Raises:
        PlanError: the costs have no separate time for weight gradients.
    """
    if not any(costs.weight_s):
        raise PlanError(
            "wgrad=gaps: costs have no weight gradients to place; give weight_s, "
            "the part of backward_s that they are"
        )
    return StageTimes(
        forward_s=costs.forward_s,
        backward_s=costs.input_s,
        weight_s=tuple(weight_s + costs.split_s for weight_s in costs.weight_s),
        transfer_s=costs.p2p_latency_s + costs.p2p_s,
    )
