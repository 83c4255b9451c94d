"""``--trace``: records how long each action of the executor takes on this rank's device."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.ops import COMPUTE_OPS
from megatron.fold3d.runtime.feature import Feature, Handler, Handlers, Iteration
from megatron.fold3d.runtime.trace.recorder import Recorder
from megatron.fold3d.runtime.transfers.carrier import Transfers

_KINDS = {**dict.fromkeys(COMPUTE_OPS, "compute"), Op.WAIT_GRAD: "wait"}
_AGAIN = (Op.GATHER_PARAM_B, Op.WAIT_PARAM_B)
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
        spanned = {op: self._spanned(inner[op], kind) for op, kind in _KINDS.items()}
        return spanned | {op: self._again(inner[op]) for op in _AGAIN}

    def _again(self, handler: Handler) -> Handler:
        def again(action: Action) -> None:
            self._recorder.gathers_again = True
            handler(action)
            self._recorder.gathers_again = False

        return again

    def _spanned(self, handler: Handler, kind: str) -> Handler:
        def spanned(action: Action) -> None:
            with self._recorder.span(action, kind):
                handler(action)

        return spanned


class RecordedP2P:
    """`Transfers` that are recorded: when each begins, and when a received tensor is taken.

    Args:
        recorder: the recorder of this rank.
        connect: makes the transfers; all ranks of the job call it together.
        pp_group: the pipeline's process group.
        device: the compute device.
    """

    def __init__(
        self,
        recorder: Recorder,
        connect: Callable[[dist.ProcessGroup, torch.device], Transfers],
        pp_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._transfers = connect(pp_group, device)
        self._recorder = recorder
        self._ends: dict[Action, Callable[[], None]] = {}  # by posted receive
        self.begin_iteration = self._transfers.begin_iteration
        self.announce = self._transfers.announce
        self.drain = self._transfers.drain

    def post(self, action: Action, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Start to receive; the recorded event ends when the tensor is taken."""
        self._ends[action] = self._recorder.open_span(action, "p2p")
        self._transfers.post(action, shape, dtype)

    def take(self, action: Action) -> torch.Tensor:
        """Return a received tensor, as `Transfers.take` says, and record the wait for it.

        The wait is named after the computation that reads the tensor.
        """
        computation = Action(action.stage, _COMPUTATION[action.op], action.microbatch)
        with self._recorder.span(f"wait {computation}", "wait"):
            tensor = self._transfers.take(action)
        self._ends.pop(action)()
        return tensor

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send, as `Transfers.send` says.

        The event has no duration, since the end of a send is not observed.
        """
        self._recorder.open_span(action, "p2p")()
        self._transfers.send(action, tensor)
