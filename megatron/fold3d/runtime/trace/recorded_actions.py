"""``--trace``: records how long each action of the executor takes on this rank's device."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import Action, Program
from megatron.fold3d.plan.ops import COMPUTE_OPS, GATHER_OPS, SYNC_OPS, TABLE
from megatron.fold3d.plan.waits import Waits
from megatron.fold3d.runtime.feature import Feature, Handler, Handlers, Iteration
from megatron.fold3d.runtime.trace.recorder import Recorder
from megatron.fold3d.runtime.transfers.carrier import Transfers

_SUMS = SYNC_OPS - GATHER_OPS
_WAIT_FOR_SUMS = frozenset(op for op in TABLE if any(n.op in _SUMS for n in TABLE[op].needs))


class RecordedActions(Feature):
    """Records computations and waits for sums; a computation's span excludes its transfers.

    DP.sync, copies and transfers are recorded where they begin and end, and so are the waits for
    parameters inside computations, and optimizer steps inside waits.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return wrappers that record a span around each action that computes or waits for sums."""
        recorder = self._recorder
        if not recorder.is_on:
            return {}
        awaited = dict(_awaited(iteration.program))

        def recorded(handler: Handler) -> Handler:
            def record(action: Action) -> None:
                recorder.running = action
                if action.op in COMPUTE_OPS:
                    with recorder.span(action, "compute"):
                        handler(action)
                elif action in awaited:
                    with recorder.span(f"wait {awaited[action]}", "wait"):
                        handler(action)
                else:
                    handler(action)
                recorder.running = None

            return record

        return {op: recorded(inner[op]) for op in COMPUTE_OPS | GATHER_OPS | _WAIT_FOR_SUMS}


def _awaited(program: Program) -> Iterator[tuple[Action, Action]]:
    """Yield the actions that wait for sums, each with the last sum that it waits for."""
    waits = Waits(program)
    for index, action in enumerate(program):
        if action.op in _WAIT_FOR_SUMS and (sums := [s for s, _ in waits.at(index, action)]):
            yield action, max(sums, key=lambda action: action.end)


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
        """Return a received tensor, as `Transfers.take` says, and record the wait for it."""
        with self._recorder.span(f"wait {action}", "wait"):
            tensor = self._transfers.take(action)
        self._ends.pop(action)()
        return tensor

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send, as `Transfers.send` says.

        The event has no duration, since the end of a send is not observed.
        """
        self._recorder.open_span(action, "p2p")()
        self._transfers.send(action, tensor)
