"""``--preemptive-comm``: transfers that preempt DP.sync."""

from time import monotonic

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.ops import BACK
from megatron.fold3d.runtime.device import runs_behind
from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator
from megatron.fold3d.runtime.transfers.p2p import P2P


class PreemptiveP2P(P2P):
    """A `P2P` whose transfers the communicator's scheduler starts, before any slice of DP.sync.

    It announces when a transfer will start, so that the link is free then. On a GPU nothing can be
    announced: the host runs ahead of the device and does not know when the computation before a
    send begins.

    Args:
        communicator: a connected communicator; its neighbours include those of the pipeline.
    """

    def __init__(
        self,
        communicator: PreemptiveCommunicator,
        pp_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        super().__init__(pp_group, device)
        self._groups = {
            op: communicator.group(group, direction=int(op in BACK))
            for op, group in self._groups.items()
        }
        self._announces = not runs_behind(device)
        self._announced: dict[Action, float] = {}  # when
        self._computing_s: dict[tuple[int, Op], float] = {}  # from an announcement to its send

    def announce(self, action: Action) -> None:
        """Announce the send ``action``, with the delay that the previous micro-batch had."""
        if not self._announces:
            return
        self._announced[action] = monotonic()
        if (eta_s := self._computing_s.get((action.stage, action.op))) is not None:
            self._groups[action.op].announce(self._peers[action.op], eta_s)

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send ``tensor``, as `P2P.send` says."""
        if self._announces:
            self._computing_s[action.stage, action.op] = monotonic() - self._announced.pop(action)
        super().send(action, tensor)
