"""A model chunk's gradients, cut into what is reduced together.

Keeps one invariant: the cut depends on the sizes of parameters, the share and the size of a slice
alone, so every replica of a chunk cuts it alike.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Slice:
    """A contiguous 1-D view of a bucket's gradient buffer, with its reduce op and process group."""

    data: torch.Tensor
    op: Any
    group: dist.ProcessGroup

    @property
    def num_bytes(self) -> int:
        """The size of the view in bytes."""
        return self.data.numel() * self.data.element_size()

    def reduce(self) -> dist.Work:
        """Start an asynchronous in-place all-reduce of the view and return its work."""
        work: dist.Work | None = dist.all_reduce(
            self.data, self.op, group=self.group, async_op=True
        )
        assert work is not None
        return work

    def cut(self, size: int) -> tuple["Slice", "Slice"]:
        """Split into the first ``size`` elements and the remaining ones; both stay views."""
        return (
            Slice(self.data[:size], self.op, self.group),
            Slice(self.data[size:], self.op, self.group),
        )


def kept_ranges(
    bucket: Any, reduced_in_iteration: Container[torch.nn.Parameter]
) -> list[tuple[int, int]]:
    """Return the sorted ``(begin, end)`` ranges of ``reduced_in_iteration`` in a bucket."""
    return sorted(bucket.param_to_index[p] for p in bucket.params if p in reduced_in_iteration)


def slices(
    bucket: Any, reduced_in_iteration: Container[torch.nn.Parameter], slice_bytes: int
) -> Iterator[torch.Tensor]:
    """Yield 1-D views of all other gradients of a bucket, each at most ``slice_bytes`` large."""
    data = bucket.grad_data
    edges = [0, *chain.from_iterable(kept_ranges(bucket, reduced_in_iteration)), data.numel()]
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        if begin < end:
            yield from data[begin:end].split(slice_bytes // data.element_size())


def divide(whole: Sequence[Slice], share: float) -> tuple[list[Slice], list[Slice]]:
    """Split slices into the first ``share`` of their elements, counted together, and the rest."""
    left = round(share * sum(part.data.numel() for part in whole))
    first: list[Slice] = []
    rest: list[Slice] = []
    for part in whole:
        ours, others = part.cut(left)
        left -= ours.data.numel()
        first += [ours] if ours.data.numel() else []
        rest += [others] if others.data.numel() else []
    return first, rest
