"""Options of NCCL's process groups: the priority of their packets and kernels.

Keeps one invariant: other backends get no options. **No GPU has run this.**
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def options(
    backend: str, timeout: timedelta, *, traffic_class: int | None, first: bool = False
) -> Any:
    """Return the ``pg_options`` of a group, or None for the backend's defaults.

    Args:
        backend: the backend of the group.
        timeout: the timeout of the group.
        traffic_class: the mark of its packets: InfiniBand's service level or RoCE's traffic class.
        first: whether its kernels run on a high-priority stream.
    """
    if backend != "nccl" or (traffic_class is None and not first):
        return None
    made = dist.ProcessGroupNCCL.Options(is_high_priority_stream=first)
    made._timeout = timeout
    return marked(made, traffic_class)


def marked(made: Any, traffic_class: int | None) -> Any:
    """Set the traffic class of NCCL's options, unless it is None; return the options."""
    if traffic_class is not None:
        made.config.traffic_class = traffic_class
    return made
