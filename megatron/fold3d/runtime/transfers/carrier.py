"""The interface of all implementations of transfers, some of which wrap another."""

from collections.abc import Sequence
from typing import Protocol

import torch

from megatron.fold3d.plan.ir import Action, Program


class Transfers(Protocol):
    """The transfers of one pipeline rank, as `PipelineTransfers` calls them.

    A received tensor is contiguous, ``[seq, batch, hidden]`` with seq split by context and sequence
    parallelism, and in the configuration's ``pipeline_dtype``.
    """

    def begin_iteration(self, program: Program, num_bytes: int) -> None:
        """Prepare for an iteration whose transfers take ``num_bytes`` each.

        Raises:
            HostMemoryError: the host has too little memory for tensors that wait there.
        """

    def post(self, action: Action, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Start the receive ``action`` (RECV_F or RECV_B) of one tensor; `take` waits for it."""

    def take(self, action: Action) -> torch.Tensor:
        """Return the tensor of a posted receive, on the device; the caller owns it.

        It has the shape and dtype of `post`, and is valid on the current stream.
        """

    def announce(self, action: Action) -> None:
        """Announce that the computation before ``action`` (SEND_F or SEND_B) begins."""

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send ``tensor``, on the device; the caller may reassign ``tensor.data`` at once.

        It must be valid on the current stream. Its storage is kept alive until the send is done.
        """

    def drain(self) -> None:
        """Wait until every send has left; every receive must have been taken."""
