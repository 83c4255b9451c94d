"""The judge predicts by simulation how long an iteration of a choice takes.

Training, the planner, `fold3d simulate` and ``--check`` use it, each with its own costs: measured
times, given numbers, or estimates for a model on a cluster.
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
    """The simulation of a job.

    Attributes:
        job: the simulated job, with its placed weight gradients and its shares of DP.sync.
    """

    job: Job
    plan: Plan
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """The seconds of a steady iteration."""
        return self.timeline.period_s


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Predicts the iterations of a job.

    Attributes:
        costs: costs of the stages; of reduce-scatters and all-gathers if the job steps shards.
        may_receive_early: whether the run may post its receives early instead of late.
        transfers: whether SEND and RECV are simulated as actions, which matters if streams share
            queues, and in pairs. Otherwise a result is sent when its computation ends.
        cuts_slices: whether slices of DP.sync are simulated. Where streams share no queue, slices
            delay nothing and can be left out.
        has_room: tells from a plan whether memory has room; otherwise the plan is not simulated.
        fits: tells from a simulation whether it fits into memory; one that fits is preferred.
        held: bytes of micro-batches, and limits of ranks, for weight gradients in gaps. With None,
            or if the choice has ``held``, the number of micro-batches is limited instead.
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
        """The approximate number of computations that a prediction simulates."""
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
        """Return the fastest simulation over receives, and over placements of weight gradients.

        Raises:
            PlanError: the job cannot run, or memory has no room.
        """
        if (found := self._fastest()) is None:
            raise PlanError(f"{self.job.choice}: memory has no room for it")
        return found

    def _fastest(self) -> Simulated | None:
        plans = [(job, self._lowered(job)) for job in self._jobs()]
        found = [self._run(job, plan) for job, plan in plans if self.has_room(plan)]
        if len(found) == 1:  # `fits` and `seconds` read the whole timeline
            return found[0]
        return min(found, key=lambda one: (not self.fits(one), one.seconds), default=None)

    def _jobs(self) -> Iterator[Job]:
        """Yield the job with each order to compare: each time of receives, each placement.

        Weight gradients stay in their backwards if memory has no room to delay them.

        Raises:
            PlanError: weight gradients are to be placed, and the costs have no time for them.
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
        """Return the plan to simulate; sums are cut into slices once shares are known."""
        choice = replace(job.choice, slices=self.cuts_slices and bool(job.shares))
        return lower(replace(job, choice=choice), transfers=self.transfers)

    def _run(self, job: Job, plan: Plan) -> Simulated:
        """Simulate a plan; if it carries sums, first choose their shares and lower it again."""
        choice, costs, link = job.choice, self.costs, self.link
        if not choice.carries:
            costs = _with_steps_last(costs, job.num_ranks)
        else:
            shares = (choice.share or 0.0,) * plan.num_stages
            if choice.share is None:  # with slices DP.sync delays nothing, as without queues
                alone = replace(link, device=None) if self.cuts_slices else link
                shares = auto_shares(plan, costs, alone)
            job = replace(job, shares=shares)
            plan = self._lowered(job)
        timeline = steady_state(plan, costs, link)
        return Simulated(job=job, plan=plan, timeline=timeline)


def _with_steps_last(costs: Costs, num_ranks: int) -> Costs:
    """Move each rank's optimizer steps to its first segment, whose gradients are complete last."""
    if not (steps := costs.optimizer_s):
        return costs
    first = tuple(sum(steps[rank::num_ranks]) for rank in range(num_ranks))
    return replace(costs, optimizer_s=first + (0.0,) * (len(steps) - num_ranks))


def stage_times(costs: Costs) -> StageTimes:
    """Return the seconds of forwards, backwards, weight gradients and transfers, for placement.

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
