"""``--lazy-inter-segment``: transfers between two segments go from host memory to host memory.

All other transfers are those of a run without the flag.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import Action, Program
from megatron.fold3d.plan.ops import BACK, FORTH, PEER
from megatron.fold3d.runtime.transfers.carrier import Transfers
from megatron.fold3d.runtime.transfers.host_link import HostLink
from megatron.fold3d.runtime.transfers.p2p import make_groups


class LazyP2P:
    """`Transfers` that use a `HostLink` between two segments, and other transfers within one.

    Args:
        connect: makes the transfers within a segment; all ranks of the job call it together.
        timeout: the timeout of one transfer over the host link.
        pp_group: the pipeline's process group.
        device: the compute device.
    """

    def __init__(
        self,
        connect: Callable[[dist.ProcessGroup, torch.device], Transfers],
        timeout: timedelta,
        pp_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._within = connect(pp_group, device)
        self._between = _host_link(pp_group, device, timeout)

    def begin_iteration(self, program: Program, num_bytes: int) -> None:
        """Reserve the host memory for an iteration whose transfers take ``num_bytes`` each.

        Raises:
            HostMemoryError: the host has less.
        """
        self._within.begin_iteration(program, num_bytes)
        self._between.begin_iteration(program, num_bytes)

    def post(self, action: Action, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Start the receive ``action`` of one tensor; `take` waits for it."""
        self._carrier(action).post(action, shape, dtype)

    def take(self, action: Action) -> torch.Tensor:
        """Return the tensor of a posted receive, as `Transfers.take` says."""
        return self._carrier(action).take(action)

    def announce(self, action: Action) -> None:
        """Announce a transfer within a segment; the host link's need no announcement."""
        self._carrier(action).announce(action)

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send ``tensor``, as `Transfers.send` says."""
        self._carrier(action).send(action, tensor)

    def drain(self) -> None:
        """Wait until every send has left; every receive must have been taken."""
        self._within.drain()
        self._between.drain()

    def _carrier(self, action: Action) -> Transfers:
        return self._between if self._between.carries(action) else self._within


def _host_link(pp_group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> HostLink:
    """Make the host link from the pipeline's last rank to its first, with its process groups."""
    forward, backward = make_groups(pp_group, "gloo", timeout)[-1]
    last, first = pp_group.size() - 1, 0
    ways = ((FORTH, forward), (BACK, backward))
    groups = {op: group for way, group in ways for op in (way.send, way.receive)}
    peers = {op: first if step > 0 else last for op, step in PEER.items()}
    return HostLink(groups, peers, device, timeout, pp_group.size())
