"""A rank's program as the items that the host issues to a GPU, by the rules of `device_queues`.

As in the runtime, DP.sync is a number of collectives. If DDP's hooks launch them inside a backward,
the backward is cut into parts there.
"""

from collections.abc import Container, Sequence
from enum import IntEnum
from math import ceil
from typing import NamedTuple

from megatron.fold3d.observe.messages import message_from, reader_of, source_of
from megatron.fold3d.plan.device_queues import (
    Stream,
    reduced_apart,
    send_waits,
    stream_of,
)
from megatron.fold3d.plan.ir import Action, hooked
from megatron.fold3d.plan.ops import (
    COMPUTE_OPS,
    COPY_OPS,
    GATHER_OPS,
    P2P_OPS,
    SEND_OPS,
    SUM_OPS,
    SYNC_OPS,
    WAYS,
)
from megatron.fold3d.predict.simulator.link import Device
from megatron.fold3d.predict.simulator.steps import NO_FACT, Name, Step, Steps

_READ_MESSAGES = {way.compute for way in WAYS}


class Kind(IntEnum):
    """The kind of an item, which decides what happens when it begins."""

    COMPUTE = 0
    WAIT = 1  # takes no time
    COLLECTIVE = 2
    TRANSFER = 3  # one side of it
    COPY = 4  # or a collective inside a node: neither uses the network
    UPDATE = 5  # the optimizer's step


class Item(NamedTuple):
    """A unit of work on a stream."""

    kind: Kind
    stream: Stream
    action: Action
    """Of a wait, what is waited for."""
    seconds: float
    after: int
    """How many earlier items of the compute stream must have ended before it begins."""
    needs: tuple[tuple[int, int], ...] = ()
    """As in `Step`."""
    fact: int = NO_FACT
    """The fact that comes true when it ends."""
    first: int = 0
    """As in `Step`."""


class Items:
    """Makes the items of all ranks.

    Args:
        steps: the steps of the plan, with its transfers.
        device: the device that runs them.
        alternates: whether receives and reductions use two streams, as ours do with one queue.

    Attributes:
        num_facts: how many facts come true: those of the steps, and that a collective which cuts a
            computation is over.
    """

    def __init__(self, steps: Steps, device: Device, *, alternates: bool) -> None:
        self._steps, self._device, self._alternates = steps, device, alternates
        self.num_facts = len(steps.named)

    def of(self, program: Sequence[Step]) -> list[Item]:
        """Return the items of one iteration of a rank, in the order of issue."""
        actions = tuple(step.action for step in program)
        apart = reduced_apart(actions, self._steps.plan.num_ranks) if self._alternates else ()
        issued = _Issued(self._steps.named, apart)
        inside = self._launched_inside(program)
        launched = {step.action for step in inside.values()}
        of_stock = self._steps.sends_waited_for
        waited_for = {} if of_stock else send_waits(actions)
        for index, step in enumerate(program):
            action = step.action
            op = action.op
            if op in COMPUTE_OPS:
                self._issue_computation(issued, step, inside.get(action))
            elif op in P2P_OPS:
                fact = self._arrival(action)
                issued.transfer(action, stream_of(action, alternates=self._alternates), fact)
                if op in SEND_OPS and source_of(message_from(action)).op in of_stock:
                    issued.wait_for(action, fact)
            elif op in SYNC_OPS:
                if action not in launched:
                    count = self._launches(step)
                    for part in range(count):
                        issued.launch(step, part, count)
            elif op in COPY_OPS:
                issued.copy(step)
            else:
                issued.update(step)
            for send in waited_for.get(index, ()):
                issued.wait_for(send, self._arrival(send))
        return issued.items

    def _arrival(self, side: Action) -> int:
        """Return the fact that comes true with a transfer, given a side of it."""
        message = message_from(side) if side.op in SEND_OPS else side
        return self._steps.facts[reader_of(message)]

    def _issue_computation(self, issued: "_Issued", step: Step, reduction: Step | None) -> None:
        """Issue a computation; hooks cut it into parts and launch ``reduction`` behind these."""
        if self._device.tensor_parallel and step.action.op in _READ_MESSAGES:
            issued.cut(step, self.num_facts)
            self.num_facts += 1
            if reduction is not None:
                issued.launch(reduction, 0, 1)
            return
        count = 1 if reduction is None else self._launches(reduction)
        for part in range(count):
            issued.compute(step, part, count)
            if reduction is not None:
                issued.launch(reduction, part, count)

    def _launched_inside(self, program: Sequence[Step]) -> dict[Action, Step]:
        """Return the reductions that DDP's hooks launch, by the backward in which they do so."""
        if not self._device.in_backward:
            return {}
        stages = hooked(tuple(step.action for step in program))
        found: dict[Action, Step] = {}
        last = program[0].action  # computation
        for step in program:
            if step.action.op in COMPUTE_OPS:
                last = step.action
            elif step.action.op in SUM_OPS and step.action.stage in stages and step.seconds:
                found[last] = step
        return found

    def _launches(self, step: Step) -> int:
        """Return the number of collectives in a step's DP.sync: its part of the whole stage's."""
        (stage, op, _), seconds, *_ = step
        if not self._device.launches or not seconds or op not in SUM_OPS | GATHER_OPS:
            return 1
        share = seconds / self._steps.costs.grad_sync_s[stage] if op in SUM_OPS else 1.0
        return max(1, ceil(self._device.launches[stage] * share - 1e-9))


class _Issued:
    """The items of a rank's iteration, collected in the order of issue."""

    def __init__(self, named: Sequence[Name], apart: Container[int]) -> None:
        self._named, self._apart = named, apart
        self.items: list[Item] = []
        self._computed = 0  # items of the compute stream so far
        self._waited_for: set[tuple[int, int]] = set()

    def compute(self, step: Step, part: int, count: int) -> None:
        """Issue one of ``count`` parts of a computation."""
        needs = self._wait_for_sync(step)
        self._add(Kind.COMPUTE, step, step.seconds / count, needs, fact=part + 1 == count)
        self._computed += 1

    def cut(self, step: Step, fact: int) -> None:
        """Issue a computation in two parts, with a collective of its node between them."""
        self.compute(step, 0, 2)
        self.items.append(
            Item(Kind.COPY, Stream.TP_SYNC, step.action, 0.0, self._computed, (), fact)
        )
        self.wait_for(step.action, fact)
        self.compute(step, 1, 2)

    def update(self, step: Step) -> None:
        """Issue what is between two iterations, if it waits for something or takes time."""
        self._wait_for_sync(step)
        if step.seconds:
            self._add(Kind.UPDATE, step, step.seconds)
            self._computed += 1

    def transfer(self, action: Action, stream: Stream, fact: int) -> None:
        """Issue one side of a transfer."""
        self.items.append(Item(Kind.TRANSFER, stream, action, 0.0, self._computed, (), fact))

    def copy(self, step: Step) -> None:
        """Issue a copy to the host or back."""
        self._add(Kind.COPY, step, step.seconds, step.needs, fact=True)

    def launch(self, step: Step, part: int, count: int) -> None:
        """Issue one of the ``count`` collectives of a step's DP.sync, which is over with all."""
        self._add(Kind.COLLECTIVE, step, step.seconds / count, fact=part + 1 == count)

    def wait_for(self, action: Action, fact: int, ago: int = 0) -> None:
        """Make the compute stream wait for an action."""
        needs = ((fact, ago),)
        self.items.append(Item(Kind.WAIT, Stream.COMPUTE, action, 0.0, self._computed, needs))
        self._computed += 1

    def _wait_for_sync(self, step: Step) -> tuple[tuple[int, int], ...]:
        """Make the compute stream wait for DP.sync that a step needs; return its other needs."""
        others = []
        for need in step.needs:
            if (name := self._named[need[0]])[1] not in SYNC_OPS:
                others.append(need)
            elif need not in self._waited_for:
                self._waited_for.add(need)
                self.wait_for(Action(*name), *need)
        return tuple(others)

    def _add(
        self,
        kind: Kind,
        step: Step,
        seconds: float,
        needs: tuple[tuple[int, int], ...] = (),
        *,
        fact: bool = False,
    ) -> None:
        stream = stream_of(step.action, alternates=False, apart=self._apart)
        brought = step.fact if fact else NO_FACT
        self.items.append(
            Item(kind, stream, step.action, seconds, self._computed, needs, brought, step.first)
        )
