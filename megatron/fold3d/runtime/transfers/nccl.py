"""Options of NCCL's process groups: those of Megatron's group beside which ours is made.

Keeps one invariant: other backends get no options. **No GPU has run this.**
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def options(
    backend: str, beside: dist.ProcessGroup, timeout: timedelta, *, first: bool = False
) -> Any:
    """Return the ``pg_options`` of a group, or None for the backend's defaults.

    They are Megatron's: what the file of ``--nccl-communicator-config-path`` says of its group, and
    the traffic class.

    Args:
        backend: the backend of the group.
        beside: Megatron's group for the same kind of communication.
        timeout: the timeout of the group.
        first: whether its kernels run on a high-priority stream, even if Megatron's do not.
    """
    if backend != "nccl":
        return None
    theirs: Any = beside._get_backend(torch.device("cuda")).options
    is_first = first or theirs.is_high_priority_stream
    made = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_first)
    made.config = theirs.config
    made._timeout = timeout
    return made
