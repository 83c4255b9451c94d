"""Transfers for GPUs whose streams share one hardware queue: receives use two streams in turns.

In such a queue a receive that waits for the one before it blocks computation. NCCL runs the
transfers of a communicator in one stream, so with a communicator for even micro-batches and one for
odd micro-batches, a receive can be posted while the one before it is still in flight:

    one stream   RECV_F0 ──────>|F0|  RECV_F1 ──────>|F1|      the link idles until F1 is posted
    two streams  RECV_F0 ──────>|F0|
                          RECV_F1 ──────>|F1|

Sends stay one after the other. If two of them shared the link, the first, which is needed first,
would arrive later.

**No GPU has run this.**
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.ops import SEND_OPS
from megatron.fold3d.runtime.device import streams_of
from megatron.fold3d.runtime.transfers.p2p import P2P


class AlternatingP2P(P2P):
    """A `P2P` with two communicators for each direction of a link between GPUs."""

    def __init__(self, pp_group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(pp_group, device)
        self._groups_of_odd = self._connect(pp_group)
        self._streams = streams_of(device)
        self._sending = {op: self._streams.Stream() for op in SEND_OPS}
        self._last_sent: dict[Op, dist.Work] = {}

    def _group(self, action: Action) -> Any:
        assert action.microbatch is not None
        return (self._groups_of_odd if action.microbatch % 2 else self._groups)[action.op]

    def _start_send(self, action: Action, tensor: torch.Tensor) -> dist.Work:
        """Start a send behind the current stream's work and the last send of its direction."""
        stream = self._sending[action.op]
        stream.wait_stream(self._streams.current_stream())
        with self._streams.stream(stream):
            if (last := self._last_sent.get(action.op)) is not None:
                last.wait()  # this stream does, not the host
            work = self._last_sent[action.op] = P2P._start_send(self, action, tensor)
        return work
