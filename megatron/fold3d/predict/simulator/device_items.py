"""A rank's program as the items that the host issues to a GPU, by the rules of `device_queues`.

As in the runtime, DP.sync consists of several collectives. If DDP's hooks launch them inside a
backward, the backward is cut into parts at the launches.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from megatron.fold3d.observe.messages import message_from, reader_of
from megatron.fold3d.observe.timeline import Lane
from megatron.fold3d.plan.device_queues import Stream, reduced_apart, send_waits, stream_of
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
from megatron.fold3d.predict.simulator.steps import NO_FACT, Step, Steps

_READ_MESSAGES = {way.compute for way in WAYS}
_Needs = tuple[tuple[int, int], ...]


class Item(NamedTuple):
    """An operation on a stream: a kernel, a collective, one side of a transfer, or a wait."""

    lane: Lane
    """The lane of the item's span. P2P is one side of a transfer, COPY may also be a collective
    inside a node, which uses no network, and WAIT takes no time of its own."""
    stream: Stream
    action: Action
    """The action that the item belongs to; for a wait, the awaited action."""
    seconds: float
    after: int
    """How many items of the compute stream must have ended before this item begins."""
    needs: _Needs = ()
    """See `Step.needs`."""
    fact: int = NO_FACT
    """The fact that comes true when the item ends."""
    first: int = 0
    """See `Step.first`."""


class Items:
    """Makes the items of all ranks.

    Attributes:
        num_facts: the number of facts: the facts of `Steps`, and one for the end of each collective
            that cuts a computation.
    """

    def __init__(self, steps: Steps, device: Device) -> None:
        self._steps, self._device = steps, device
        # With one queue, our receives and reductions alternate between two streams. Stock Megatron
        # waits for its sends, and has one communicator for each direction.
        self._alternates = device.connections == 1 and not steps.link.sends_waited_for
        self.num_facts = len(steps.named)

    def of(self, program: Sequence[Step]) -> Iterator[Item]:
        """Yield the items of one iteration of a rank, in the order of issue."""
        steps, device, alternates = self._steps, self._device, self._alternates
        actions = tuple(step.action for step in program)
        apart = reduced_apart(actions, steps.plan.num_ranks) if alternates else ()
        inside = self._launched_inside(program)
        launched = {step.action for step in inside.values()}
        waits_at_once = {way.send for way in WAYS if way.compute in steps.sends_waited_for}
        sends_waited_for = {} if waits_at_once else send_waits(actions)
        awaited: set[tuple[int, int]] = set()  # DP.sync that the compute stream has awaited
        computed = 0  # items on the compute stream so far

        def item(
            lane: Lane,
            stream: Stream,
            action: Action,
            seconds: float = 0.0,
            needs: _Needs = (),
            fact: int = NO_FACT,
            first: int = 0,
        ) -> Item:
            nonlocal computed
            after = computed
            computed += stream is Stream.COMPUTE
            return Item(lane, stream, action, seconds, after, needs, fact, first)

        def part_of(
            lane: Lane, step: Step, needs: _Needs = (), *, part: int = 0, count: int = 1
        ) -> Item:
            """Return one of ``count`` equal parts of a step, which ends with the last part."""
            stream = stream_of(step.action, alternates=False, apart=apart)
            fact = step.fact if part + 1 == count else NO_FACT
            return item(lane, stream, step.action, step.seconds / count, needs, fact, step.first)

        def wait_for(action: Action, fact: int, ago: int = 0) -> Item:
            return item(Lane.WAIT, Stream.COMPUTE, action, needs=((fact, ago),))

        for index, step in enumerate(program):
            action, op = step.action, step.action.op
            if op in P2P_OPS:
                arrival = step.fact if op in SEND_OPS else steps.facts[reader_of(action)]
                stream = stream_of(action, alternates=alternates)
                yield item(Lane.P2P, stream, action, fact=arrival)
                if op in waits_at_once:
                    yield wait_for(action, arrival)
            elif op in SYNC_OPS:
                count = 0 if action in launched else self._launches(step)
                for part in range(count):
                    yield part_of(Lane.GRAD_SYNC, step, part=part, count=count)
            elif op in COPY_OPS:
                yield part_of(Lane.COPY, step, step.needs)
            else:
                others = []
                for need in step.needs:
                    if (name := steps.named[need[0]])[1] not in SYNC_OPS:
                        others.append(need)
                    elif need not in awaited:
                        awaited.add(need)
                        yield wait_for(Action(*name), *need)
                needs, reduction = tuple(others), inside.get(action)
                if op not in COMPUTE_OPS:  # the optimizer's step
                    if step.seconds:
                        yield part_of(Lane.OPTIMIZER, step)
                elif device.tensor_parallel and op in _READ_MESSAGES:
                    cut = self.num_facts  # the end of a collective that cuts the computation
                    self.num_facts += 1
                    yield part_of(Lane.COMPUTE, step, needs, part=0, count=2)
                    yield item(Lane.COPY, Stream.TP_SYNC, action, fact=cut)
                    yield wait_for(action, cut)
                    yield part_of(Lane.COMPUTE, step, needs, part=1, count=2)
                    if reduction is not None:
                        yield part_of(Lane.GRAD_SYNC, reduction)
                else:  # hooks cut a backward into parts, and launch a collective after each
                    count = 1 if reduction is None else self._launches(reduction)
                    for part in range(count):
                        yield part_of(Lane.COMPUTE, step, needs, part=part, count=count)
                        if reduction is not None:
                            yield part_of(Lane.GRAD_SYNC, reduction, part=part, count=count)
            for send in sends_waited_for.get(index, ()):
                yield wait_for(send, steps.facts[reader_of(message_from(send))])

    def _launched_inside(self, program: Sequence[Step]) -> dict[Action, Step]:
        """Return the reductions that DDP's hooks launch, keyed by the backward that runs them."""
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
        """Return the number of a step's collectives, in proportion to its part of the stage."""
        (stage, op, _), seconds, *_ = step
        if not self._device.launches or not seconds or op not in SUM_OPS | GATHER_OPS:
            return 1
        share = seconds / self._steps.costs.grad_sync_s[stage] if op in SUM_OPS else 1.0
        return max(1, ceil(self._device.launches[stage] * share - 1e-9))
