"""The interface of what carries transfers, so that one carrier may stand around another."""

from collections.abc import Sequence
from typing import Protocol

import torch

from megatron.fold3d.plan.ir import Action, Program


class Transfers(Protocol):
    """The transfers of one pipeline rank, as `PipelineTransfers` calls them.

    A transferred tensor is contiguous where it is received, ``[seq, batch, hidden]`` with seq split
    by context and sequence parallelism, and in the configuration's ``pipeline_dtype``.
    """

    def begin_iteration(self, program: Program, num_bytes: int) -> None:
        """Prepare for an iteration whose transfers take ``num_bytes`` each.

        Raises:
            HostMemoryError: the host has less memory than tensors that wait there need.
        """

    def post(self, action: Action, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Start the receive ``action`` (RECV_F or RECV_B) of one tensor; `take` waits for it."""

    def take(self, action: Action) -> torch.Tensor:
        """Return the tensor of a posted receive, on the device; the caller owns it.

        It has the shape and dtype of `post`, and is valid on the current stream.
        """

    def announce(self, action: Action) -> None:
        """Announce that the computation of what ``action`` (SEND_F or SEND_B) will send begins."""

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send ``tensor``, on the device; the caller may reassign ``tensor.data`` at once.

        It must be valid on the current stream. Its storage is kept alive until the send is done.
        """

    def drain(self) -> None:
        """Wait until every send has left; every receive must have been taken."""
