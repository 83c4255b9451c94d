"""What torch calls the collectives of one tensor: it renamed these methods in 2.13.

Keeps one invariant: a process group of ours answers to the names of every torch that we allow, and
calls the group below by a name that this one has.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

BEFORE_2_13 = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""The older name of each method."""


def under_both_names[Group: type[dist.ProcessGroup]](group: Group) -> Group:
    """Give a class the older name of each of these methods that it defines; return the class."""
    for name, older in BEFORE_2_13.items():
        if name in vars(group):
            setattr(group, older, vars(group)[name])
    return group


def known_name(owner: object, name: str) -> str:
    """Return what a process group, or the class of one, calls one of these methods."""
    return name if hasattr(owner, name) else BEFORE_2_13[name]


def method_of(group: dist.ProcessGroup, name: str) -> Callable[..., Any]:
    """Return one of these methods of a group, whatever it calls it."""
    method: Callable[..., Any] = getattr(group, known_name(group, name))
    return method
