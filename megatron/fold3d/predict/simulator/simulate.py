"""Simulate a plan: an event-driven run that yields the timeline of a cluster.

Each rank runs its program strictly in order, one computation at a time. Experts' all-to-alls are
part of computations and, between nodes, also use the network: see `Traffic`. A message leaves at
its SEND or, in a plan without transfers, when its computation ends. After its latency the message
flows through the NICs of both ranks. Messages between two ranks flow one after the other, as in one
communicator. The computation that reads a message waits for it. A RECV does nothing here, since
`add_p2p` always posts receives in time.

Sums and all-gathers go into their rank's queue of DP.sync, which sends one at a time; REDUCE_KEPT
has a separate queue. The plan decides what an action waits for: see `plan.waits`. OFFLOAD and
RELOAD run on `policy.copy_streams`.

With a `Device`, the plan runs by the rules of GPUs instead: see `DeviceRun`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.fold3d.observe.messages import message_from, send_of, source_of
from megatron.fold3d.observe.timeline import Lane, Span, Timeline
from megatron.fold3d.plan.ir import Action, Plan, PlanError, gc_paused
from megatron.fold3d.plan.ops import (
    COMPUTE_OPS,
    COPY_OPS,
    P2P_OPS,
    SYNC_OPS,
    TABLE,
    UPDATE_OPS,
    Place,
)
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.policy.copy_streams import CopyStreams
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import PLAIN, GradSyncOrder, Link
from megatron.fold3d.predict.simulator.steps import NO_FACT, Step, Steps
from megatron.fold3d.predict.simulator.sync_queue import SyncQueue
from megatron.fold3d.predict.simulator.traffic import Traffic

TOLERANCE = 1e-4  # relative; with shared queues, iterations may drift by less than this for ever
_NUMBERS = (3, 4, 6, 12, 24)  # numbers of iterations to simulate until the last one is steady


@gc_paused()
def simulate(plan: Plan, costs: Costs, link: Link = PLAIN, *, iterations: int = 1) -> Timeline:
    """Return the timeline of ``iterations`` runs of the plan, one after the other.

    Args:
        iterations: the number of iterations; carried DP.sync has an effect from the second on.

    Raises:
        PlanError: the costs are for another plan, or a rank waits for something that never happens.
    """
    return _simulated(_prepared(plan, costs, link), iterations)


def _prepared(plan: Plan, costs: Costs, link: Link) -> Steps:
    """Check a plan against its costs and link; return its steps, with transfers for a `Device`."""
    costs.check(plan.num_stages)
    nics = link.nic_of_rank
    if nics is not None and len(nics) != plan.num_ranks:
        raise PlanError(
            f"found {len(nics)} NICs; the plan has {plan.num_ranks} ranks, one for each"
        )
    device = link.device
    if device is not None and plan.num_ranks > 1 and not plan.has(*P2P_OPS):
        plan = add_p2p(plan, receives_late=device.connections == 1)
    return Steps(plan, costs, link)


def _simulated(steps: Steps, iterations: int) -> Timeline:
    if (device := steps.link.device) is not None:
        from megatron.fold3d.predict.simulator.device_run import DeviceRun

        return DeviceRun(steps, device, iterations).timeline()
    return _Run(steps, iterations).timeline()


@gc_paused()
def steady_state(plan: Plan, costs: Costs, link: Link = PLAIN) -> Timeline:
    """Simulate until iterations take equally long, so that the last one is steady.

    If ranks meet between iterations, the first one is already steady. Otherwise the first ones
    differ, since some work is carried. If times alternate for ever, the last of `_NUMBERS` is used.

    Args:
        plan: a plan with DP.sync; without it every iteration is steady.
    """
    if plan.flushes:
        return simulate(plan, costs, link)
    steps = _prepared(plan, costs, link)
    for iterations in _NUMBERS:
        timeline = _simulated(steps, iterations)
        *_, before_s, start_s, end_s = (0.0, *timeline.iteration_ends_s(0))
        settled = abs((end_s - start_s) - (start_s - before_s)) <= TOLERANCE * (end_s - start_s)
        if settled:
            break
    return timeline


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank's position in its program."""

    number: int
    program: list[Step]
    spans: list[Span]
    queues: dict[Place, SyncQueue]
    iteration: int = 0
    position: int = 0
    since_s: float = 0.0
    """The time at which the rank reached its current step."""
    awaits: int = NO_FACT
    """The fact that the rank waits for."""
    awaits_arrival: "_Message | None" = None
    """The sent message whose arrival the rank waits for."""
    copies: CopyStreams = field(default_factory=CopyStreams)


class _Message(NamedTuple):
    """A message in flight; ``action`` is the receiver's RECV."""

    sender: _Rank
    receiver: _Rank
    action: Action
    fact: int
    left_s: float


class _Run:
    """All ranks, the network that they share, and the facts that have come true."""

    def __init__(self, steps: Steps, iterations: int) -> None:
        self.steps, self.iterations = steps, iterations
        self.traffic = Traffic(steps)
        self.clock = self.traffic.clock
        self.flushes = steps.plan.flushes
        self.times_true = [0] * len(steps.named)
        self.at_flush: list[_Rank] = []
        self.ranks = [self._rank(*numbered) for numbered in enumerate(steps.programs)]

    def _rank(self, number: int, program: list[Step]) -> _Rank:
        spans: list[Span] = []
        orders: dict[Place, GradSyncOrder] = {
            Place.DP_SYNC: self.steps.link.grad_sync_order,
            Place.DP_SYNC_KEPT: "fifo",
        }
        queues = {
            place: SyncQueue(self.traffic, number, order, spans.append)
            for place, order in orders.items()
        }
        return _Rank(number, program, spans, queues)

    def timeline(self) -> Timeline:
        for rank in self.ranks:
            self.advance(rank)
        self.clock.run(between=self.traffic.network.update_rates)
        if stuck := [rank for rank in self.ranks if rank.iteration < self.iterations]:
            steps = [(rank.number, rank.program[rank.position].action) for rank in stuck[:8]]
            where = ", ".join(f"rank {number} at {action}" for number, action in steps)
            raise PlanError(f"deadlock: {where}; each waits for what comes later or never")
        return Timeline.of(rank.spans for rank in self.ranks)

    def advance(self, rank: _Rank) -> None:
        """Run a rank's program until it computes, waits or ends."""
        program, times_true = rank.program, self.times_true
        while rank.iteration < self.iterations:
            if rank.position == len(program):
                if self.flushes:
                    self._meet(rank)
                    return
                self._begin_next_iteration(rank)
                continue
            step = program[rank.position]
            (_, op, _), seconds, needs, fact, first = step
            iteration = rank.iteration
            if iteration < first:
                if fact != NO_FACT:
                    times_true[fact] += 1
                self._go_on(rank)
                continue
            for needed, ago in needs:
                if times_true[needed] <= iteration - ago and op not in COPY_OPS:
                    rank.awaits = needed  # a copy waits on its own stream instead
                    return
            if op in COMPUTE_OPS or (seconds and op in UPDATE_OPS):
                rank.since_s = self.clock.now_s
                self.traffic.compute(rank.number, step.action, seconds, self._finish, rank)
                return
            if op in SYNC_OPS:
                rank.queues[TABLE[op].place].enqueue_sync(step, iteration, self.come_true)
            elif op in COPY_OPS:
                self._copy(rank, step)
            elif fact != NO_FACT:
                self._send(rank, step)
            self._go_on(rank)
            if rank.awaits_arrival:
                return

    def come_true(self, fact: int) -> None:
        """Count a fact as true once more; if its rank waits for it, let the rank continue."""
        self.times_true[fact] += 1
        rank = self.ranks[self.steps.rank_of[fact]]
        if rank.awaits == fact:
            rank.awaits = NO_FACT
            if (name := self.steps.named[fact])[1] in SYNC_OPS:
                self._write(rank, Lane.WAIT, rank.since_s, Action(*name), rank.iteration)
                rank.since_s = self.clock.now_s
            self.advance(rank)

    def _go_on(self, rank: _Rank) -> None:
        rank.position += 1
        rank.since_s = self.clock.now_s

    def _begin_next_iteration(self, rank: _Rank) -> None:
        rank.iteration += 1
        rank.position = 0
        rank.since_s = self.clock.now_s

    def _meet(self, rank: _Rank) -> None:
        """Wait for all ranks at the end of an iteration; the last one wakes the others."""
        self.at_flush.append(rank)
        if len(self.at_flush) < len(self.ranks):
            return
        ranks, self.at_flush = self.at_flush, []
        for waiting in ranks:
            self._write(waiting, Lane.WAIT, waiting.since_s, None, waiting.iteration)
            self._begin_next_iteration(waiting)
        for waiting in ranks:
            self.advance(waiting)

    def _finish(self, rank: _Rank) -> None:
        step = rank.program[rank.position]
        if step.action.op in COMPUTE_OPS:
            self._write(rank, Lane.COMPUTE, rank.since_s, step.action, rank.iteration)
            if step.fact != NO_FACT:
                self._send(rank, step)
        else:
            self._write(rank, Lane.OPTIMIZER, rank.since_s, step.action, rank.iteration)
        self._go_on(rank)
        if not rank.awaits_arrival:
            self.advance(rank)

    def _send(self, sender: _Rank, step: Step) -> None:
        """Send the result of a computation to the rank that reads it."""
        receiver = self.ranks[self.steps.rank_of[step.fact]]
        if receiver is sender:
            self.come_true(step.fact)
            return
        action = message_from(step.action)
        message = _Message(sender, receiver, action, step.fact, self.clock.now_s)
        if (waited_for := self.steps.sends_waited_for) and source_of(action).op in waited_for:
            sender.awaits_arrival = message
        self.traffic.send(sender.number, receiver.number, action.op, self._arrive, message)

    def _arrive(self, message: _Message) -> None:
        sender, receiver, action, fact, left_s = message
        # A rank reads a message once per iteration, so its count is the number of the iteration.
        self._write(receiver, Lane.P2P, left_s, action, self.times_true[fact])
        self.come_true(fact)
        if sender.awaits_arrival is message:
            sender.awaits_arrival = None
            self._write(sender, Lane.WAIT, sender.since_s, send_of(action), sender.iteration)
            sender.since_s = self.clock.now_s
            self.advance(sender)

    def _copy(self, rank: _Rank, step: Step) -> None:
        start_s = rank.copies.start_copy(step.action, self.clock.now_s, step.seconds)
        end_s = start_s + step.seconds
        if step.seconds:
            rank.spans.append(Span(Lane.COPY, start_s, end_s, step.action, rank.iteration))
        self.clock.at(end_s, self.come_true, step.fact)

    def _write(
        self, rank: _Rank, lane: Lane, start_s: float, action: Action | None, iteration: int
    ) -> None:
        if self.clock.now_s > start_s or lane is Lane.COMPUTE:  # without layers, 0 s long
            rank.spans.append(Span(lane, start_s, self.clock.now_s, action, iteration))
