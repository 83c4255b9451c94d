"""``--trace``: records how long each action of the executor takes on this rank's device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.runtime.feature import Feature, Handler, Handlers, Iteration
from megatron.fold3d.runtime.trace.recorder import Recorder
from megatron.fold3d.runtime.transfers.p2p import P2P

_KINDS = {
    Op.FORWARD: "compute",
    Op.BACKWARD: "compute",
    Op.WEIGHT: "compute",
    Op.RECOMPUTE: "compute",
    Op.WAIT_GRAD: "wait",
}
_COMPUTATION = {Op.RECV_F: Op.FORWARD, Op.RECV_B: Op.BACKWARD}  # that uses the received tensor


class RecordedActions(Feature):
    """Records computations and waits; a computation's span excludes its transfers.

    DP.sync, copies and transfers are recorded where they begin and end: in Megatron's DDP or
    `DeferredSync`, in `Offloader` and in `RecordedP2P`.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return wrappers that record a span around each op that computes or waits."""
        return {op: self._spanned(inner[op], kind) for op, kind in _KINDS.items()}

    def _spanned(self, handler: Handler, kind: str) -> Handler:
        def spanned(action: Action) -> None:
            with self._recorder.span(action, kind):
                handler(action)

        return spanned


class RecordedP2P(P2P):
    """A `P2P` that records when transfers begin, and when receives are taken."""

    def __init__(self, recorder: Recorder, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._recorder = recorder
        self._ends: dict[Action, Callable[[], None]] = {}  # of receives that were posted

    def post(self, action: Action, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Start to receive; the recorded event ends when the tensor is taken."""
        self._ends[action] = self._recorder.begin(action, "p2p")
        super().post(action, shape, dtype)

    def take(self, action: Action) -> torch.Tensor:
        """Return a received tensor; record the wait, named after the computation that needs it."""
        computation = Action(action.stage, _COMPUTATION[action.op], action.microbatch)
        with self._recorder.span(f"wait {computation}", "wait"):
            tensor = super().take(action)
        self._ends.pop(action)()
        return tensor

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send; the event has no length, since the end of a send is not observed."""
        self._recorder.begin(action, "p2p")()
        super().send(action, tensor)
