"""Simulate a plan: an event-driven run that gives the timeline a cluster would.

Each rank runs its program strictly in order, one computation at a time. A message leaves at its
SEND - in a plan without transfers, when its computation ends - waits for the latency, and flows
through the NICs of both ranks; a computation waits for its message. REDUCE_GRAD puts the stage's
DP.sync on the rank's queue, of which one at a time flows; WAIT_GRAD waits until what was started
last for its stage is done, in this iteration or the one before. What is kept back of a DP.sync that
is deferred has a queue of its own. OFFLOAD and RELOAD run on one copy
stream per direction. A message does not wait for its RECV: `add_p2p` posts none of them late.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from megatron.fold3d.analysis.clock import Clock
from megatron.fold3d.analysis.costs import Costs
from megatron.fold3d.analysis.network import Network
from megatron.fold3d.analysis.steps import NO_FACT, Step, Steps
from megatron.fold3d.analysis.sync_queue import GradSyncOrder, SyncQueue
from megatron.fold3d.analysis.timeline import Lane, Span, Timeline
from megatron.fold3d.plan.ir import COMPUTE_OPS, Action, Op, Plan, PlanError, gc_paused

_SOURCES = {
    Op.FORWARD: Op.FORWARD,
    Op.SEND_F: Op.FORWARD,
    Op.BACKWARD: Op.BACKWARD,
    Op.SEND_B: Op.BACKWARD,
    Op.WEIGHT: Op.WEIGHT,
}
"""What computed the message that an action sends."""


@gc_paused()
def simulate(
    plan: Plan,
    costs: Costs,
    *,
    iterations: int = 1,
    nic_of_rank: Sequence[int] | None = None,
    grad_sync_order: GradSyncOrder = "fifo",
    preemptive: bool = True,
    pause_share: float = 1.0,
    flush: bool = False,
    in_order: bool = False,
    sends_waited_for: Collection[Op] = (),
    backward_share: Sequence[float] = (),
) -> Timeline:
    """Return the timeline of ``iterations`` runs of the plan, one after the other.

    Args:
        plan: with or without transfers and DP.sync.
        costs: of the plan's stages.
        iterations: how many; work deferred into the next one shows from the second on.
        nic_of_rank: the NIC that each rank uses; one of its own by default.
        grad_sync_order: "edf" lets the DP.sync that is needed first overtake the others.
        preemptive: PP.sync goes before DP.sync on a shared link; otherwise they share it fairly.
        pause_share: of each second, what PP.sync may keep DP.sync waiting if it goes first.
        flush: no rank begins an iteration before all have ended the one before.
        in_order: messages between two ranks in one direction go one after the other, as those of
            one communicator do; otherwise they share the link.
        sends_waited_for: FORWARD or BACKWARD, after which a rank stands still until the result has
            arrived, as stock Megatron does.
        backward_share: per stage, the part of DP.sync that its REDUCE_GRAD starts; the rest of all
            stages follows the last action (paper Algorithm 2). None is all at once.

    Raises:
        PlanError: the costs are of another plan, or a rank waits for what never comes.
    """
    costs.check(plan)
    nics = tuple(range(plan.num_ranks) if nic_of_rank is None else nic_of_rank)
    if len(nics) != plan.num_ranks:
        raise PlanError(
            f"found {len(nics)} NICs; the plan has {plan.num_ranks} ranks, one for each"
        )
    steps = Steps(plan, costs, backward_share)
    run = _Run(steps, costs, nics, grad_sync_order, preemptive, pause_share, iterations, flush)
    run.in_order = in_order
    if not costs.sends_are_buffered:
        run.sends_waited_for = frozenset(sends_waited_for)
    return run.timeline()


class _Rank:
    """Where a rank is in its program."""

    __slots__ = (
        *("awaits", "copies_end_s", "iteration", "number", "position", "program"),
        *("kept_back_queue", "queue", "sends", "since_s", "spans"),
    )

    def __init__(self, number: int, program: list[Step]) -> None:
        self.number = number
        self.program = program
        self.iteration = 0
        self.position = 0
        self.since_s = 0.0  # when it came to its step
        self.awaits = NO_FACT  # what holds it up there
        self.copies_end_s = {Op.OFFLOAD: 0.0, Op.RELOAD: 0.0}
        self.sends: Step | None = None  # the message that it stands still for
        self.spans: list[Span] = []
        self.queue: SyncQueue
        self.kept_back_queue: SyncQueue


class _Message(NamedTuple):
    """A result on its way."""

    sender: _Rank
    receiver: _Rank
    step: Step
    left_s: float


class _Run:
    """All ranks, what they share, and what has come true so far."""

    def __init__(
        self,
        steps: Steps,
        costs: Costs,
        nics: tuple[int, ...],
        order: GradSyncOrder,
        preemptive: bool,
        pause_share: float,
        iterations: int,
        flush: bool,
    ) -> None:
        self.costs, self.nics = costs, nics
        self.iterations, self.flush = iterations, flush
        self.sends_waited_for: frozenset[Op] = frozenset()
        self.in_order = False
        self.channels: defaultdict[tuple[int, int, Op], deque[_Message]] = defaultdict(deque)
        self.clock = Clock()
        # Behind the NICs, one more pair of links per rank: for DP.sync that stays in the node.
        local_nics = range(1 + max(nics), 1 + max(nics) + len(nics))
        self.network = Network(
            self.clock, local_nics.stop, preemptive=preemptive, pause_share=pause_share
        )
        self.steps = steps
        self.times_true = [0] * self.steps.num_facts
        self.times_begun = [0] * self.steps.num_facts  # of DP.sync: it may end iterations later
        self.offloads_end_s: dict[tuple[int, int | None], float] = {}
        self.at_flush: list[_Rank] = []
        self.ranks = list(map(_Rank, range(len(nics)), self.steps.programs))
        for rank, nic in zip(
            self.ranks, local_nics if costs.grad_sync_local else nics, strict=True
        ):
            write, tell = rank.spans.append, self.come_true
            rank.queue = SyncQueue(self.clock, self.network, nic, order, write, tell)
            rank.kept_back_queue = SyncQueue(self.clock, self.network, nic, "fifo", write, tell)

    def timeline(self) -> Timeline:
        for rank in self.ranks:
            self.advance(rank)
        self.clock.run(between=self.network.settle)
        if stuck := [rank for rank in self.ranks if rank.iteration < self.iterations]:
            steps = [(rank.number, rank.program[rank.position].action) for rank in stuck[:8]]
            where = ", ".join(f"rank {number} at {action}" for number, action in steps)
            raise PlanError(f"deadlock: {where}; each waits for what comes later or never")
        return Timeline.of(rank.spans for rank in self.ranks)

    def advance(self, rank: _Rank) -> None:
        """Run a rank's program up to where it computes, waits or has ended."""
        program, times_true = rank.program, self.times_true
        while rank.iteration < self.iterations:
            if rank.position == len(program):
                if self.flush:
                    self._meet(rank)
                    return
                self._begin_next_iteration(rank)
                continue
            step = program[rank.position]
            for fact in step.needs:
                if times_true[fact] <= rank.iteration:
                    rank.awaits = fact
                    return
            op, fact = step.action.op, step.fact
            if op in COMPUTE_OPS:
                self._occupy(rank, step.seconds)
                return
            if op is Op.WAIT_GRAD or op is Op.WAIT_PARAM:
                if times_true[fact] < self.times_begun[fact]:
                    rank.awaits = fact
                    return
                self._write(rank, Lane.WAIT, rank.since_s, step.action, rank.iteration)
                if step.seconds and self.times_begun[fact]:
                    self._occupy(rank, step.seconds)
                    return
            elif op is Op.REDUCE_GRAD or op is Op.GATHER_PARAM:
                self.times_begun[fact] += 1
                queue = rank.kept_back_queue if self.steps.is_kept_back(fact) else rank.queue
                queue.start(step.action, rank.iteration, step.seconds, fact)
            elif op is Op.OFFLOAD or op is Op.RELOAD:
                self._copy(rank, step)
            elif fact != NO_FACT:
                self._send(rank, step)
            self._go_on(rank)
            if rank.sends:
                return

    def come_true(self, fact: int) -> None:
        """Note a fact, and let its rank go on if it waits for it."""
        self.times_true[fact] += 1
        rank = self.ranks[self.steps.rank_of(fact)]
        if rank.awaits == fact:
            rank.awaits = NO_FACT
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

    def _occupy(self, rank: _Rank, seconds: float) -> None:
        rank.since_s = self.clock.now_s
        self.clock.at(rank.since_s + seconds, self._finish, rank)

    def _finish(self, rank: _Rank) -> None:
        step = rank.program[rank.position]
        if step.action.op in COMPUTE_OPS:
            self._write(rank, Lane.COMPUTE, rank.since_s, step.action, rank.iteration)
            if step.fact != NO_FACT:
                self._send(rank, step)
        else:
            self._write(rank, Lane.OPTIMIZER, rank.since_s, step.action, rank.iteration)
        self._go_on(rank)
        if not rank.sends:
            self.advance(rank)

    def _send(self, sender: _Rank, step: Step) -> None:
        """Let the result of a computation leave for the rank that reads it."""
        receiver = self.ranks[self.steps.rank_of(step.fact)]
        if receiver is sender:
            self.come_true(step.fact)
            return
        costs, leaves_s = self.costs, self.clock.now_s
        message = _Message(sender, receiver, step, leaves_s)
        if _SOURCES[step.action.op] in self.sends_waited_for:
            sender.sends = step
        local = self.nics[sender.number] == self.nics[receiver.number]
        if local or not costs.p2p_s:
            flows_s = costs.p2p_local_s if local else 0.0
            self.clock.at(leaves_s + costs.p2p_latency_s + flows_s, self._arrive, message)
        elif costs.p2p_latency_s:
            self.clock.at(leaves_s + costs.p2p_latency_s, self._flow, message)
        else:
            self._flow(message)

    def _flow(self, message: _Message) -> None:
        """Let a message go as soon as those before it in its channel have arrived."""
        if self.in_order:
            channel = self._channel(message)
            channel.append(message)
            if len(channel) > 1:
                return
        self._put_on_network(message)

    def _channel(self, message: _Message) -> "deque[_Message]":
        sender, receiver, step, _ = message
        return self.channels[sender.number, receiver.number, _SOURCES[step.action.op]]

    def _put_on_network(self, message: _Message) -> None:
        source, target = self.nics[message.sender.number], self.nics[message.receiver.number]
        work_s = self.costs.p2p_s
        self.network.start(self.network.message(source, target, work_s, self._arrive, message))

    def _arrive(self, message: _Message) -> None:
        sender, receiver, step, left_s = message
        action, _, _, fact = step
        if self.in_order and (channel := self._channel(message)):  # else it used no network
            channel.popleft()
            if channel:
                self._put_on_network(channel[0])
        stage, op, microbatch = action
        forward = _SOURCES[op] is Op.FORWARD
        received = (
            Action(stage + 1, Op.RECV_F, microbatch)
            if forward
            else Action(stage - 1, Op.RECV_B, microbatch)
        )
        # A rank reads each message once per iteration, so counting them tells their iteration.
        self._write(receiver, Lane.P2P, left_s, received, self.times_true[fact])
        self.come_true(fact)
        if sender.sends is step:
            sender.sends = None
            sent = Action(stage, Op.SEND_F if forward else Op.SEND_B, microbatch)
            self._write(sender, Lane.WAIT, sender.since_s, sent, sender.iteration)
            sender.since_s = self.clock.now_s
            self.advance(sender)

    def _copy(self, rank: _Rank, step: Step) -> None:
        """Put a copy on its stream; activations come back no earlier than they have left."""
        stage, op, microbatch = step.action
        left_s = self.offloads_end_s.get((stage, microbatch), 0.0) if op is Op.RELOAD else 0.0
        starts_s = max(self.clock.now_s, rank.copies_end_s[op], left_s)
        ends_s = rank.copies_end_s[op] = starts_s + step.seconds
        if op is Op.OFFLOAD:
            self.offloads_end_s[stage, microbatch] = ends_s
        if step.seconds:
            rank.spans.append(Span(Lane.COPY, starts_s, ends_s, step.action, rank.iteration))
        if step.fact != NO_FACT:
            self.clock.at(ends_s, self.come_true, step.fact)

    def _write(
        self, rank: _Rank, lane: Lane, start_s: float, action: Action | None, iteration: int
    ) -> None:
        if self.clock.now_s > start_s:
            rank.spans.append(Span(lane, start_s, self.clock.now_s, action, iteration))
