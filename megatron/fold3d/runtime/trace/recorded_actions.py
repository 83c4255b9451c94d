"""``--trace``: records how long each action of the executor takes on this rank's device."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from megatron.fold3d.plan.ir import Action, Program
from megatron.fold3d.plan.ops import COMPUTE_OPS, GATHER_OPS, SYNC_OPS, TABLE
from megatron.fold3d.plan.waits import Waits
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration, within
from megatron.fold3d.runtime.trace.tracer import Tracer

_SUMS = SYNC_OPS - GATHER_OPS
_WAIT_FOR_SUMS = frozenset(op for op in TABLE if any(n.op in _SUMS for n in TABLE[op].needs))


class RecordedActions(Feature):
    """Records computations and waits for sums; a computation's span excludes its transfers.

    DP.sync, copies and transfers are recorded where they begin and end, and so are the waits for
    parameters inside computations, and optimizer steps inside waits.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer, self._recorder = tracer, tracer.recorder

    def prepare(self, iteration: Iteration) -> None:
        """Let the tracer have the plan of the latest training iteration."""
        if iteration.trains:
            self._tracer.plan = iteration.plan

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return wrappers that record a span around each action that computes or waits for sums."""
        recorder = self._recorder
        if not recorder.is_on:
            return {}
        awaited = dict(_awaited(iteration.program))

        @contextmanager
        def recorded(action: Action) -> Iterator[None]:
            recorder.running = action
            with ExitStack() as span:
                if action.op in COMPUTE_OPS:
                    span.enter_context(recorder.span(action, "compute"))
                elif action in awaited:
                    span.enter_context(recorder.span(f"wait {awaited[action]}", "wait"))
                yield
            recorder.running = None

        recorded_ops = COMPUTE_OPS | GATHER_OPS | _WAIT_FOR_SUMS
        return {op: within(recorded, inner[op]) for op in recorded_ops}


def _awaited(program: Program) -> Iterator[tuple[Action, Action]]:
    """Yield the actions that wait for sums, each with the last sum that it waits for."""
    waits = Waits(program)
    for index, action in enumerate(program):
        if action.op in _WAIT_FOR_SUMS and (sums := [s for s, _ in waits.at(index, action)]):
            yield action, max(sums, key=lambda action: action.end)
