"""A rank's program as the items that the host issues to a GPU, by the rules of `device_queues`.

As in the runtime, DP.sync is a number of collectives. If DDP's hooks launch them inside a backward,
the backward is cut into parts there.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from enum import IntEnum
from math import ceil
from typing import NamedTuple

from megatron.fold3d.observe.messages import message_from, source_of
from megatron.fold3d.plan.device_queues import STREAM_OF, Stream, send_waits
from megatron.fold3d.plan.ir import (
    COMPUTE_OPS,
    GATHER_OPS,
    HOST_OPS,
    PARAM_WAIT_OPS,
    RECV_OPS,
    SEND_OPS,
    Action,
    Op,
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

    Attributes:
        num_facts: facts are numbered below this.
    """

    def __init__(
        self,
        steps: Steps,
        device: Device,
        grad_sync_s: Sequence[float],
        sends_waited_for: Collection[Op],
    ) -> None:
        self._steps, self._device = steps, device
        self._grad_sync_s = grad_sync_s
        self._sends_waited_for = sends_waited_for
        self.num_facts = steps.num_facts
        self._sliced = {
            step.action.stage
            for program in steps.programs
            for step in program
            if step.action.op is Op.REDUCE_SLICE
        }

    def of(self, program: Sequence[Step]) -> list[Item]:
        """Return the items of one iteration of a rank, in the order of issue."""
        items: list[Item] = []
        computed = 0
        begun: Counter[int] = Counter()  # collectives, by their fact
        waits: list[tuple[int, Step, int]] = []  # for them: index, step, how many had begun

        def launch(step: Step, count: int) -> None:
            in_iteration = self._steps.is_reduced_in_iteration(step.fact)
            stream = Stream.IN_ITERATION if in_iteration else Stream.DP_SYNC
            seconds, fact = step.seconds / count, step.fact
            items.append(Item(Kind.COLLECTIVE, stream, step.action, seconds, computed, (), fact))
            begun[fact] += 1

        def wait_for(send: Action, fact: int) -> None:
            nonlocal computed
            needs = ((fact, 1, 1),)
            items.append(Item(Kind.WAIT, Stream.COMPUTE, send, 0.0, computed, needs))
            computed += 1

        inside = self._launched_inside(program)
        launched = {step.action for step in inside.values()}
        ours = not self._sends_waited_for
        waited_for = send_waits(tuple(step.action for step in program)) if ours else {}
        sends: dict[Action, int] = {}  # their facts
        offloaded: dict[tuple[int, int | None], int] = {}  # facts as well
        for index, step in enumerate(program):
            action, seconds, facts, fact = step
            stage, op, microbatch = action
            if op in HOST_OPS:  # the host's work alone
                continue
            stream = STREAM_OF[op]
            if op in COMPUTE_OPS:
                needs = tuple([(needed, 1, 1) for needed in facts])
                if action not in inside:
                    items.append(Item(Kind.COMPUTE, stream, action, seconds, computed, needs, fact))
                    computed += 1
                else:
                    reduction, count = inside[action], self._launches(inside[action])
                    for part in range(count):
                        own = fact if part + 1 == count else NO_FACT
                        part_s = seconds / count
                        items.append(
                            Item(Kind.COMPUTE, stream, action, part_s, computed, needs, own)
                        )
                        computed += 1
                        launch(reduction, count)
            elif op in SEND_OPS:
                sends[action] = fact
                items.append(Item(Kind.TRANSFER, stream, action, 0.0, computed, (), fact))
                if not ours and source_of(message_from(action)).op in self._sends_waited_for:
                    wait_for(action, fact)
            elif op in RECV_OPS:
                fact = self._steps.arrival(action)
                items.append(Item(Kind.TRANSFER, stream, action, 0.0, computed, (), fact))
            elif op is Op.WAIT_GRAD or op in PARAM_WAIT_OPS:
                waits.append((len(items), step, begun[fact]))
                items.append(Item(Kind.WAIT, stream, action, seconds, computed))
                computed += 1
            elif op is Op.REDUCE_GRAD or op is Op.REDUCE_SLICE or op in GATHER_OPS:
                if action not in launched:
                    count = self._launches(step)
                    for _ in range(count):
                        launch(step, count)
            else:
                needs = ()
                if op is Op.OFFLOAD:
                    offloaded[stage, microbatch] = fact = self.num_facts
                    self.num_facts += 1
                elif (left := offloaded.get((stage, microbatch))) is not None:
                    needs = ((left, 1, 1),)
                items.append(Item(Kind.COPY, stream, action, seconds, computed, needs, fact))
            for send in waited_for.get(index, ()):
                wait_for(send, sends[send])
        for index, step, count in waits:
            needs = ((step.fact, begun[step.fact], count),)
            items[index] = items[index]._replace(needs=needs)
        return items

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
