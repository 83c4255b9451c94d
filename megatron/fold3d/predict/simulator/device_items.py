"""A rank's program as the items that the host issues to a GPU, by the rules of `device_queues`.

As in the runtime, DP.sync is a number of collectives. If DDP's hooks launch them inside a backward,
the backward is cut into parts there.
"""

from collections import Counter
from collections.abc import Collection, Container, Sequence
from enum import IntEnum
from math import ceil
from typing import NamedTuple

from megatron.fold3d.observe.messages import message_from, source_of
from megatron.fold3d.plan.device_queues import (
    STREAM_OF,
    Stream,
    reduced_apart,
    send_waits,
    stream_of,
)
from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.ops import (
    COMPUTE_OPS,
    GATHER_OPS,
    HOST_OPS,
    RECV_OPS,
    SEND_OPS,
    SYNC_OPS,
    WAIT_OPS,
)
from megatron.fold3d.plan.passes.grad_sync import deferred_stages
from megatron.fold3d.plan.passes.weight_grads import split_stages
from megatron.fold3d.predict.simulator.execution import Device
from megatron.fold3d.predict.simulator.steps import NO_FACT, Step, Steps


class Kind(IntEnum):
    """The kind of an item, which decides what happens when it begins."""

    COMPUTE = 0
    WAIT = 1  # does nothing or, if it has seconds, is the optimizer's step
    COLLECTIVE = 2
    TRANSFER = 3  # one side of it
    COPY = 4


class Item(NamedTuple):
    """A unit of work on a stream."""

    kind: Kind
    stream: Stream
    action: Action
    seconds: float
    after: int
    """How many earlier items of the compute stream must have ended before it begins."""
    needs: tuple[tuple[int, int, int], ...] = ()
    """``(fact, each, own)``: in iteration i, a fact must have come true i * each + own times."""
    fact: int = NO_FACT
    """The fact that comes true when it ends."""


class Items:
    """Makes the items of all ranks.

    Args:
        steps: the steps of the plan, with its transfers.
        device: the device that runs them.
        grad_sync_s: seconds of each stage's whole DP.sync.
        sends_waited_for: as in `Execution`.
        alternates: whether receives and reductions use two streams, as ours do with one queue.

    Attributes:
        num_facts: facts are numbered below this.
    """

    def __init__(
        self,
        steps: Steps,
        device: Device,
        grad_sync_s: Sequence[float],
        sends_waited_for: Collection[Op],
        *,
        alternates: bool,
    ) -> None:
        self._steps, self._device = steps, device
        self._grad_sync_s = grad_sync_s
        self._sends_waited_for = sends_waited_for
        self._alternates = alternates
        self.num_facts = steps.num_facts
        self._sliced = {
            step.action.stage
            for program in steps.programs
            for step in program
            if step.action.op is Op.REDUCE_SLICE
        }

    def of(self, program: Sequence[Step]) -> list[Item]:
        """Return the items of one iteration of a rank, in the order of issue."""
        actions = tuple(step.action for step in program)
        apart = reduced_apart(actions, self._steps.num_ranks) if self._alternates else ()
        issued = _Issued(self._steps, apart)
        inside = self._launched_inside(program)
        launched = {step.action for step in inside.values()}
        ours = not self._sends_waited_for
        waited_for = send_waits(actions) if ours else {}
        sends: dict[Action, int] = {}  # their facts
        offloaded: dict[tuple[int, int | None], int] = {}  # facts as well
        for index, step in enumerate(program):
            stage, op, microbatch = action = step.action
            if op in HOST_OPS:  # they issue nothing to the device
                continue
            if op in COMPUTE_OPS:
                self._issue_computation(issued, step, inside.get(action))
            elif op in SEND_OPS:
                sends[action] = step.fact
                issued.transfer(action, STREAM_OF[op], step.fact)
                if not ours and source_of(message_from(action)).op in self._sends_waited_for:
                    issued.wait_for_send(action, step.fact)
            elif op in RECV_OPS:
                stream = stream_of(action, alternates=self._alternates)
                issued.transfer(action, stream, self._steps.arrival(action))
            elif op in WAIT_OPS:
                issued.wait_for_sync(step)
            elif op in SYNC_OPS:
                if action not in launched:
                    count = self._launches(step)
                    for _ in range(count):
                        issued.launch(step, count)
            elif op is Op.OFFLOAD:
                offloaded[stage, microbatch] = self.num_facts
                issued.copy(step, (), self.num_facts)
                self.num_facts += 1
            else:
                left = offloaded.get((stage, microbatch))
                issued.copy(step, () if left is None else ((left, 1, 1),), step.fact)
            for send in waited_for.get(index, ()):
                issued.wait_for_send(send, sends[send])
        return issued.all_items()

    def _issue_computation(self, issued: "_Issued", step: Step, reduction: Step | None) -> None:
        """Issue a computation; hooks cut it into parts and launch ``reduction`` behind these."""
        if reduction is None:
            issued.compute(step, step.seconds, step.fact)
            return
        count = self._launches(reduction)
        for part in range(count):
            issued.compute(step, step.seconds / count, step.fact if part + 1 == count else NO_FACT)
            issued.launch(reduction, count)

    def _launched_inside(self, program: Sequence[Step]) -> dict[Action, Step]:
        """Return the reductions that DDP's hooks launch, by the backward in which they do so."""
        if not self._device.in_backward:
            return {}
        actions = tuple(step.action for step in program)
        others = split_stages(actions) | deferred_stages(actions) | self._sliced  # hooks are quiet
        backward = {s.action.stage: s.action for s in program if s.action.op is Op.BACKWARD}
        return {
            backward[step.action.stage]: step
            for step in program
            if step.action.op is Op.REDUCE_GRAD and step.action.stage not in others and step.seconds
        }

    def _launches(self, step: Step) -> int:
        """Return the number of collectives in a step's DP.sync: its part of the whole stage's."""
        stage = step.action.stage
        if stage in self._sliced and step.action.op not in GATHER_OPS:
            return 1
        in_iteration = self._steps.is_reduced_in_iteration(step.fact)
        if not self._device.launches or not step.seconds or in_iteration:
            return 1
        whole_s = self._grad_sync_s[stage]
        if step.action.op in GATHER_OPS or not whole_s:
            return self._device.launches[stage]
        return max(1, ceil(self._device.launches[stage] * step.seconds / whole_s - 1e-9))


class _Issued:
    """The items of a rank's iteration, collected in the order of issue."""

    def __init__(self, steps: Steps, apart: Container[int]) -> None:
        self._steps, self._apart = steps, apart
        self._items: list[Item] = []
        self._computed = 0  # items of the compute stream so far
        self._begun: Counter[int] = Counter()  # collectives so far, by their fact
        self._waits: list[tuple[int, int, int]] = []  # index of the item, fact, collectives so far

    def compute(self, step: Step, seconds: float, fact: int) -> None:
        """Issue a computation, or a part of one."""
        needs = tuple([(needed, 1, 1) for needed in step.needs])
        stream = STREAM_OF[step.action.op]
        self._add(Kind.COMPUTE, stream, step.action, seconds, needs, fact)
        self._computed += 1

    def transfer(self, action: Action, stream: Stream, fact: int) -> None:
        """Issue one side of a transfer."""
        self._add(Kind.TRANSFER, stream, action, 0.0, (), fact)

    def copy(self, step: Step, needs: tuple[tuple[int, int, int], ...], fact: int) -> None:
        """Issue a copy to the host or back."""
        stream = STREAM_OF[step.action.op]
        self._add(Kind.COPY, stream, step.action, step.seconds, needs, fact)

    def launch(self, step: Step, count: int) -> None:
        """Issue one of the ``count`` collectives of a step's DP.sync."""
        stream = stream_of(step.action, alternates=False, apart=self._apart)
        if self._steps.is_reduced_in_iteration(step.fact):
            stream = Stream.IN_ITERATION
        self._add(Kind.COLLECTIVE, stream, step.action, step.seconds / count, (), step.fact)
        self._begun[step.fact] += 1

    def wait_for_send(self, send: Action, fact: int) -> None:
        """Make the compute stream wait for a send."""
        self._add(Kind.WAIT, Stream.COMPUTE, send, 0.0, ((fact, 1, 1),))
        self._computed += 1

    def wait_for_sync(self, step: Step) -> None:
        """Make the compute stream wait for the collectives of a fact that began before."""
        self._waits.append((len(self._items), step.fact, self._begun[step.fact]))
        self._add(Kind.WAIT, STREAM_OF[step.action.op], step.action, step.seconds)
        self._computed += 1

    def all_items(self) -> list[Item]:
        """Return the items; how many collectives a wait needs is only known at the end."""
        for index, fact, count in self._waits:
            needs = ((fact, self._begun[fact], count),)
            self._items[index] = self._items[index]._replace(needs=needs)
        return self._items

    def _add(
        self,
        kind: Kind,
        stream: Stream,
        action: Action,
        seconds: float,
        needs: tuple[tuple[int, int, int], ...] = (),
        fact: int = NO_FACT,
    ) -> None:
        self._items.append(Item(kind, stream, action, seconds, self._computed, needs, fact))
