"""Patch coalesced all-gathers of gloo.

Why: each thread of a gloo group notes the name of the collective that it has ended in one string
    without a lock. ``ALLGATHER_COALESCED`` is the one name too long to be kept within that string,
    so two gathers that end at once free the same memory (torch 2.13): a rank aborts some time later
    with "malloc(): unaligned tcache chunk detected", or in a segmentation fault.
Change: tensors are gathered one by one, under a name that is short enough.
Remove when: ``ProcessGroupGloo::runLoop`` in torch takes its lock before it notes the name.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fold3d_patches.registry import Patch, replace
from megatron.fold3d.runtime.torch_names import known_name, method_of


class Works:
    """All-gathers that are waited for together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> bool:
        """Return when all of them have ended."""
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether all of them have ended."""
        return all(work.is_completed() for work in self._works)


def _one_by_one(
    self: dist.ProcessGroup,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *options: Any,
) -> Works:
    pairs = zip(outputs, inputs, strict=True)
    gather = method_of(self, "all_gather_single")
    return Works([gather(whole, part, *options) for whole, part in pairs])


def patch() -> Patch:
    """Gathers of several tensors at once."""
    name = known_name(dist.ProcessGroup, "all_gather_single_coalesced")
    return replace(f"torch.distributed:ProcessGroup.{name}", _one_by_one)
