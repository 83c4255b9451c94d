"""A simulated run on GPUs whose streams share hardware queues.

It follows the rules of `megatron.fold3d.plan.device_queues`, with times; issuing takes no time. A
transfer flows when both of its sides have begun. The seconds of a computation include its
tensor-parallel collectives.

If a collective or a transfer at the head of a queue keeps a rank from computing, the rank's wait
names this action; a wait for a transfer counts from the moment when the transfer flows.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron.fold3d.observe.messages import message_to
from megatron.fold3d.observe.timeline import Lane, Span, Timeline
from megatron.fold3d.plan.device_queues import Stream
from megatron.fold3d.plan.ir import Action, Plan, PlanError, error_at, gc_paused
from megatron.fold3d.plan.ops import P2P_OPS, SEND_OPS
from megatron.fold3d.plan.passes.transfers import add_p2p
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.device_items import Item, Items
from megatron.fold3d.predict.simulator.link import PLAIN, Device
from megatron.fold3d.predict.simulator.steps import NO_FACT, Steps
from megatron.fold3d.predict.simulator.traffic import Traffic

_COMPUTE = Stream.COMPUTE
_NCCL = (Lane.GRAD_SYNC, Lane.P2P)
_ITERATIONS = 2  # carried DP.sync of the first may block the second
_NAMED = 8  # ranks named in an error


@gc_paused()
def verify_on_device(plan: Plan, connections: int, *, tensor_parallel: bool = False) -> None:
    """Check that the plan cannot deadlock on GPUs with this many hardware queues.

    Actions take no time here, since times do not decide whether a plan ends: an action that can
    begin stays able to begin. The plan must have passed `verify`, whose checks are not repeated.

    Args:
        plan: if it has no transfers, `add_p2p` adds them for this number of queues.

    Raises:
        PlanError: ranks block each other; the message marks the action where each rank waits.
    """
    if connections < 1:
        raise PlanError(f"found {connections} hardware queues; CUDA has from 1 to 32")
    if plan.num_ranks > 1 and not plan.has(*P2P_OPS):
        plan = add_p2p(plan, receives_late=connections == 1)
    costs = Costs.uniform(plan.num_stages, forward_s=0.0, backward_s=0.0)
    device = Device(connections=connections, tensor_parallel=tensor_parallel)
    DeviceRun(Steps(plan, costs, PLAIN), device, _ITERATIONS).timeline()


class _Queue:
    """A hardware queue, and the item at its head."""

    __slots__ = ("computes", "items", "iteration", "numbers", "position", "since_s")

    def __init__(self, items: list[Item], numbers: list[int]) -> None:
        self.items, self.numbers = items, numbers
        self.computes = any(item.stream is _COMPUTE for item in items)
        self.iteration = self.position = 0
        self.since_s = 0.0  # when the current item came to the head


class _Rank:
    """A GPU with its queues, and the progress of each."""

    def __init__(self, number: int, items: Sequence[Item], connections: int) -> None:
        self.number, self.items = number, items
        streams = dict.fromkeys(item.stream for item in items)  # in the order of their first use
        of_stream = {stream: index % connections for index, stream in enumerate(streams)}
        numbers: list[list[int]] = [[] for _ in range(min(connections, len(of_stream)))]
        for index, item in enumerate(items):
            numbers[of_stream[item.stream]].append(index)
        self.queues = [_Queue([items[i] for i in own], own) for own in numbers]
        self.per_iteration = sum(item.stream is _COMPUTE for item in items)
        self.spans: list[Span] = []
        self.busy = [False] * len(Stream)
        self.flows_since_s = [0.0] * len(Stream)  # by stream, when its last transfer began to flow
        self.computed = 0
        self.free_s = 0.0  # when the compute stream became free
        self.released = 0  # iterations that may begin
        self.has_met = False
        self.issued = 0  # items of all iterations
        self.unfinished = 0  # issued operations of NCCL that have not ended


class _Work(NamedTuple):
    """A running item."""

    rank: _Rank
    item: Item
    iteration: int
    since_s: float


class DeviceRun:
    """All GPUs, with the network and the events that they share."""

    def __init__(self, steps: Steps, device: Device, iterations: int) -> None:
        self.steps, self.device = steps, device
        self.iterations, self.flush = iterations, steps.plan.flushes
        self.traffic = Traffic(steps)
        self.clock = self.traffic.clock
        items = Items(steps, device)
        programs = [list(items.of(program)) for program in steps.programs]
        self.times_true = [0] * items.num_facts
        self.begun: dict[int, _Work] = {}  # by fact, a side of a transfer that awaits the other
        self.ranks = [
            _Rank(number, program, device.connections) for number, program in enumerate(programs)
        ]
        # With one queue at most one item per stream is unfinished.
        self.most_outstanding = device.most_outstanding if device.connections > 1 else None

    def timeline(self) -> Timeline:
        """Run, and return the timeline."""
        for rank in self.ranks:
            rank.released = 1 if self.flush else self.iterations
        for rank in self.ranks:
            self._advance(rank)
        self.clock.run(between=self.traffic.network.update_rates)
        if any(map(self._heads, self.ranks)):
            raise self._deadlock()
        return Timeline.of(rank.spans for rank in self.ranks)

    def _heads(self, rank: _Rank) -> list[tuple[int, int]]:
        """Return the items at the heads of a rank's queues, as (iteration, index of the item)."""
        return sorted(
            (q.iteration, q.numbers[q.position])
            for q in rank.queues
            if q.iteration < self.iterations
        )

    def _deadlock(self) -> PlanError:
        """Return the error that names what each rank waits for, when no event is left."""
        programs = self.steps.plan.programs
        marked, reasons = {}, []
        for rank in self.ranks:
            if heads := self._heads(rank):
                at, reason = self._reason_to_wait(rank, *heads[0])
                marked[rank.number] = programs[rank.number].index(at)
                reasons.append(f"rank {rank.number}{reason}")
        connections = self.device.connections
        queues = "one hardware queue" if connections == 1 else f"{connections} hardware queues"
        text = f"deadlock with {queues}: {'; '.join(reasons[:_NAMED])}"
        return error_at(self.steps.plan, marked, text)

    def _reason_to_wait(self, rank: _Rank, iteration: int, number: int) -> tuple[Action, str]:
        """Return the action at which a rank waits, and the reason as text."""
        limit, items = self.most_outstanding, rank.items
        if limit is not None and rank.issued < rank.released * len(items):
            at = items[rank.issued % len(items)].action
            return at, f"'s host waits at {at} with {limit} of NCCL's operations unfinished"
        item = items[number]
        if item.lane is Lane.WAIT:
            return item.action, f" lets its computations wait until {item.action} is over"
        if rank.busy[item.stream]:
            before = [other.action for other in items[:number] if other.stream is item.stream]
            needed = before[-1]
        elif rank.computed < iteration * rank.per_iteration + item.after:
            computations = [other.action for other in items if other.stream is _COMPUTE]
            needed = computations[rank.computed % rank.per_iteration]
        else:
            unmet = (f for f, ago in item.needs if self.times_true[f] <= iteration - ago)
            name = Action(*self.steps.named[next(unmet)])
            needed = message_to(name) or name
        return item.action, f" is held up at {item.action} until {needed} is over"

    def _advance(self, rank: _Rank) -> None:
        """Begin all of a rank's items that can begin."""
        times_true, busy, per_iteration = self.times_true, rank.busy, rank.per_iteration
        limited, several = self.most_outstanding is not None, len(rank.queues) > 1
        moved = True
        while moved:
            moved = False
            if limited:
                self._issue(rank)
            for queue in rank.queues:
                while (iteration := queue.iteration) < rank.released:
                    item = queue.items[queue.position]
                    if busy[item.stream] or rank.computed < iteration * per_iteration + item.after:
                        break
                    if item.needs and any(
                        times_true[f] <= iteration - ago for f, ago in item.needs
                    ):
                        break
                    if (
                        limited
                        and queue.numbers[queue.position] + iteration * len(rank.items)
                        >= rank.issued
                    ):
                        break
                    self._begin(rank, queue, item)
                    moved = several
        if self.flush and not rank.has_met:
            self._meet(rank)

    def _issue(self, rank: _Rank) -> None:
        """Let the host issue items until `most_outstanding` operations of NCCL are unfinished."""
        items = rank.items
        end = rank.released * len(items)
        while rank.issued < end:
            if items[rank.issued % len(items)].lane in _NCCL:
                if rank.unfinished == self.most_outstanding:
                    return
                rank.unfinished += 1
            rank.issued += 1

    def _begin(self, rank: _Rank, queue: _Queue, item: Item) -> None:
        now_s, iteration = self.clock.now_s, queue.iteration
        lane, stream, action, seconds, _, _, _, first = item
        held_s = max(queue.since_s, rank.free_s)
        queue.since_s = now_s
        queue.position += 1
        if queue.position == len(queue.items):
            queue.position = 0
            queue.iteration += 1
        if lane is Lane.WAIT:
            self._wait(rank, action, iteration, held_s)
            rank.computed += 1
            return
        if iteration < first:
            seconds = 0.0
        rank.busy[stream] = True
        work = _Work(rank, item, iteration, now_s)
        if lane is Lane.P2P:
            if queue.computes:
                since_s = max(held_s, rank.flows_since_s[stream])
                self._wait(rank, action, iteration, since_s)
            self._meet_other_side(work)
        elif lane is Lane.GRAD_SYNC:
            if queue.computes:
                self._wait(rank, action, iteration, held_s)
            for flow in self.traffic.sync(rank.number, seconds, self._end, work):
                self.traffic.network.start_flow(flow)
        elif lane is Lane.COMPUTE:
            self.traffic.compute(rank.number, action, seconds, self._end, work)
        else:
            self.clock.at(now_s + seconds, self._end, work)

    def _wait(self, rank: _Rank, action: Action | None, iteration: int, since_s: float) -> None:
        """Record a span in which the compute stream was idle because of an action."""
        if (now_s := self.clock.now_s) > since_s:
            rank.spans.append(Span(Lane.WAIT, since_s, now_s, action, iteration))
            rank.free_s = now_s

    def _end(self, work: _Work) -> None:
        """Handle the end of an item that is neither a wait nor a transfer."""
        rank, item, iteration, since_s = work
        now_s, lane = self.clock.now_s, item.lane
        rank.busy[item.stream] = False
        if lane is Lane.GRAD_SYNC:
            rank.unfinished -= 1
        elif lane is not Lane.COPY:
            rank.computed += 1
            rank.free_s = now_s
        if now_s > since_s or lane is Lane.COMPUTE:  # a stage without layers computes for 0 s
            rank.spans.append(Span(lane, since_s, now_s, item.action, iteration))
        if item.fact != NO_FACT:
            self.times_true[item.fact] += 1
        self._advance(rank)

    def _meet_other_side(self, work: _Work) -> None:
        """Start the flow of a transfer if its other side has begun too."""
        other = self.begun.pop(work.item.fact, None)
        if other is None:
            self.begun[work.item.fact] = work
            return
        sides = (work, other) if work.item.action.op in SEND_OPS else (other, work)
        for side in sides:
            side.rank.flows_since_s[side.item.stream] = work.since_s
        sender, receiver = (side.rank.number for side in sides)
        self.traffic.send(sender, receiver, sides[1].item.action.op, self._arrive, sides)

    def _arrive(self, sides: tuple[_Work, _Work]) -> None:
        sent, received = sides
        receiver, item, iteration, _ = received
        since_s = max(sent.since_s, received.since_s)
        if (now_s := self.clock.now_s) > since_s:
            receiver.spans.append(Span(Lane.P2P, since_s, now_s, item.action, iteration))
        self.times_true[item.fact] += 1
        for side in sides:
            side.rank.busy[side.item.stream] = False
            side.rank.unfinished -= 1
        self._advance(receiver)
        self._advance(sent.rank)

    def _meet(self, rank: _Rank) -> None:
        """Wait for all ranks at the end of an iteration; the last one wakes the others."""
        if any(rank.busy) or any(queue.iteration < rank.released for queue in rank.queues):
            return
        rank.has_met = True
        if not all(other.has_met for other in self.ranks):
            return
        now_s = self.clock.now_s
        for other in self.ranks:
            self._wait(other, None, other.released - 1, other.free_s)
            if other.released < self.iterations:
                other.released += 1
                other.has_met = False
                other.free_s = now_s
                for queue in other.queues:
                    queue.since_s = now_s
        for other in self.ranks:
            self._advance(other)
