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
from torch.distributed.distributed_c10d import _CoalescingManager

from fold3d_patches.registry import replace
from megatron.fold3d.upstream.versions import collective


def _one_by_one(
    self: dist.ProcessGroup,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *options: Any,
) -> _CoalescingManager:
    works = _CoalescingManager()
    for whole, part in zip(outputs, inputs, strict=True):
        works.append(getattr(self, collective("all_gather_single"))(whole, part, *options))
    return works


_NAME = collective("all_gather_single_coalesced")

PATCHES = (replace(f"torch.distributed:ProcessGroup.{_NAME}", _one_by_one),)
