"""The judge: how long an iteration of a choice takes, by simulation.

Training, the planner, `fold3d simulate` and ``--check`` ask it, each with its own costs: measured
times, numbers, or a model on a cluster.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.compile import Job, lower
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.memory import HeldSizes
from megatron.fold3d.plan.ops import WEIGHT_OPS
from megatron.fold3d.plan.passes.place_weight_grads import StageTimes, placed_orders
from megatron.fold3d.policy.predicted import Predicted
from megatron.fold3d.predict.search.simulated_shares import auto_shares
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import PLAIN, Link
from megatron.fold3d.predict.simulator.simulate import steady_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A job, simulated.

    Attributes:
        job: what ran, with the weight gradients that fill gaps, and with its shares.
    """

    job: Job
    plan: Plan
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Of a steady iteration."""
        return self.timeline.period_s


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Predicts the iterations of a job.

    Attributes:
        costs: of its stages; of one that steps shards, of reduce-scatters and all-gathers.
        may_receive_early: whether the run may post its receives early instead of late.
        transfers: whether transfers are simulated where the plan has them: they matter where
            streams share queues, and in pairs. Else a result is sent when its computation ends.
        cuts_slices: whether DP.sync of a choice with slices is simulated in slices. Where streams
            share no queue these hold up nothing, and need not be.
        has_room: tells whether memory has room for a plan; without room it is not simulated.
        fits: tells whether memory had room for iterations; those that fit go first.
        held: what micro-batches and ranks may hold of an order whose weight gradients fill gaps, in
            bytes; without it, or with a limit of the choice, micro-batches are counted.
    """

    job: Job
    costs: Costs
    may_receive_early: bool = False
    link: Link = PLAIN
    transfers: bool = False
    cuts_slices: bool = False
    has_room: Callable[[Plan], bool] = lambda plan: True
    fits: Callable[[Simulated], bool] = lambda found: True
    held: HeldSizes | None = None

    @property
    def num_actions(self) -> int:
        """How many computations a prediction simulates, roughly."""
        order, choice = self.job.computed, self.job.choice
        once = sum(map(len, order.programs))
        places = 3 * order.num_segments if choice.fills_gaps else 1
        return once * places * (4 if choice.carries else 1)

    def predicted(self) -> Predicted:
        """Return the prediction; its seconds are infinite if memory has no room.

        Raises:
            PlanError: the job cannot run.
        """
        if (found := self._fastest()) is None:
            return Predicted(job=next(self._jobs()), seconds=inf)
        return Predicted(job=found.job, seconds=found.seconds if self.fits(found) else inf)

    def simulated(self) -> Simulated:
        """Return the fastest iterations, with weight gradients in any of the gaps.

        Raises:
            PlanError: the job cannot run, or memory has no room.
        """
        if (found := self._fastest()) is None:
            raise PlanError(f"{self.job.choice}: memory has no room for it")
        return found

    def _fastest(self) -> Simulated | None:
        plans = [(job, self._lowered(job)) for job in self._jobs()]
        found = [self._run(job, plan) for job, plan in plans if self.has_room(plan)]
        if len(found) == 1:  # reading a long timeline takes time
            return found[0]
        return min(found, key=lambda one: (not self.fits(one), one.seconds), default=None)

    def _jobs(self) -> Iterator[Job]:
        """Yield the job with its order, and what it is with weight gradients in different gaps.

        If memory has no room for them, they stay in their backwards.

        Raises:
            PlanError: the costs have no time of weight gradients to place.
        """
        jobs, order = [self.job], self.job.computed
        if self.may_receive_early and self.job.receives_late:
            jobs.append(replace(self.job, receives_late=False))
        orders = [order]
        if self.job.choice.fills_gaps and not order.has(*WEIGHT_OPS):
            times, held, limit = stage_times(self.costs), self.held, self.job.choice.held
            if held is None or limit is not None:
                held = HeldSizes.counted(order, limit)
            with suppress(PlanError):
                orders = [*placed_orders(order, times, held)]
        yield from (replace(job, order=order) for job in jobs for order in orders)

    def _lowered(self, job: Job) -> Plan:
        """Return the plan of a job as it is simulated: with whole sums, unless it has slices."""
        choice = replace(job.choice, slices=self.cuts_slices and bool(job.shares))
        return lower(replace(job, choice=choice), transfers=self.transfers)

    def _run(self, job: Job, plan: Plan) -> Simulated:
        """Simulate a plan whose sums are whole; first find the shares, and cut the slices."""
        choice, costs, link = job.choice, self.costs, self.link
        if not choice.carries:
            costs = _stepping_last(costs, job.num_ranks)
        else:
            shares = (choice.share or 0.0,) * plan.num_stages
            if choice.share is None:  # slices hold up nothing: shares as if nothing could
                alone = replace(link, device=None) if self.cuts_slices else link
                shares = auto_shares(plan, costs, alone)
            job = replace(job, shares=shares)
            plan = self._lowered(job)
        timeline = steady_state(plan, costs, link)
        return Simulated(job=job, plan=plan, timeline=timeline)


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
