"""A rank's queue of DP.sync, which puts one task at a time on the network."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

from megatron.fold3d.observe.timeline import Lane, Span
from megatron.fold3d.plan.ir import Action
from megatron.fold3d.predict.simulator.link import GradSyncOrder
from megatron.fold3d.predict.simulator.network import Flow
from megatron.fold3d.predict.simulator.steps import Step
from megatron.fold3d.predict.simulator.traffic import Traffic


class _Task(NamedTuple):
    """DP.sync of one stage; tasks are ordered by priority."""

    key: tuple[int, int]
    number: int
    action: Action
    iteration: int
    fact: int
    flows: list[Flow]


class SyncQueue:
    """A queue of tasks, in the order of their start or, with "edf", of their deadlines.

    With "edf" a task with an earlier deadline interrupts the active one. Deadlines are ordered by
    iteration, and within an iteration by segment.
    """

    def __init__(
        self,
        traffic: Traffic,
        rank: int,
        order: GradSyncOrder,
        write: Callable[[Span], None],
    ) -> None:
        self._clock, self._traffic, self._rank = traffic.clock, traffic, rank
        self._earliest_first = order == "edf"
        self._write = write
        self._waiting: list[_Task] = []
        self._active: _Task | None = None
        self._since_s = 0.0
        self._started = 0

    def enqueue_sync(self, step: Step, iteration: int, done: Callable[[int], None]) -> None:
        """Put a task into the queue; ``done`` is called with the step's fact when the task ends."""
        self._started += 1
        action, work_s, _, fact, first = step
        key = (iteration - first, action.stage) if self._earliest_first else (0, 0)
        flows = self._traffic.sync(self._rank, work_s, self._end, done)
        task = _Task(key, self._started, action, iteration, fact, flows)
        heapq.heappush(self._waiting, task)
        if self._active is not None and key < self._active.key:
            for flow in self._active.flows:
                self._traffic.network.stop_flow(flow)
            heapq.heappush(self._waiting, self._leave())
        self._next()

    def _next(self) -> None:
        if self._active is None and self._waiting:
            self._active = heapq.heappop(self._waiting)
            self._since_s = self._clock.now_s
            for flow in self._active.flows:
                self._traffic.network.start_flow(flow)

    def _end(self, done: Callable[[int], None]) -> None:
        task = self._leave()
        self._next()
        done(task.fact)

    def _leave(self) -> _Task:
        """Take the active task off the network and record its time there."""
        task, self._active = self._active, None
        assert task is not None
        if (now_s := self._clock.now_s) > self._since_s:
            span = Span(Lane.GRAD_SYNC, self._since_s, now_s, task.action, task.iteration)
            self._write(span)
        return task
