"""Which gradients of a model chunk are complete, and ready to be reduced.

Usually all of them are, when the chunk's last backward has run. In a stage whose weight gradients
are computed parameter by parameter, some are complete while others are still computed.

Keeps one invariant: each gradient is checked, scaled and handed over once.
"""

from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups
from megatron.fold3d.runtime.grad_sync.slices import outside, ranges_of


class Part(NamedTuple):
    """Complete gradients, from ``begin`` to ``end`` in the buffer of a bucket."""

    bucket_group: Any
    bucket: Any
    begin: int
    end: int

    @property
    def is_whole(self) -> bool:
        """True if it is all of its bucket."""
        return bool(self.end - self.begin == self.bucket.grad_data.numel())

    @property
    def data(self) -> torch.Tensor:
        """A view of the bucket's buffer, ``[end - begin]``, in the dtype in which DDP reduces."""
        view: torch.Tensor = self.bucket.grad_data[self.begin : self.end]
        return view


class CompleteParts:
    """The gradients of one model chunk in one iteration, handed over as they become complete."""

    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk
        self._taken: dict[Any, list[tuple[int, int]]] = {}  # by bucket

    def take(self, unfinished: Collection[torch.Tensor] = ()) -> Iterator[Part]:
        """Yield what is complete and has not been yielded; it is checked and scaled like DDP's.

        DDP neither starts nor waits for these bucket groups then, nor does
        ``finalize_model_grads``.

        Args:
            unfinished: the parameters, of any shape, whose gradients are not complete.
        """
        for bucket_group in bucket_groups(self._chunk):
            bucket_group.grad_reduce_finished = True
            for bucket in bucket_group.buckets:
                taken = self._taken.setdefault(bucket, [])
                kept = sorted([*ranges_of(bucket, unfinished), *taken])
                for begin, end in list(outside(kept, bucket.grad_data.numel())):
                    taken.append((begin, end))
                    part = Part(bucket_group, bucket, begin, end)
                    _make_ready(part)
                    yield part


def _make_ready(part: Part) -> None:
    """Check and scale gradients as Megatron's ``start_grad_sync`` does with whole buckets."""
    config = part.bucket_group.ddp_config
    if config.check_for_nan_in_grad or config.check_for_large_grads:
        alone = SimpleNamespace(buckets=[SimpleNamespace(grad_data=part.data)])
        type(part.bucket_group).check_grads(
            alone,
            check_for_nan_or_inf=config.check_for_nan_in_grad,
            check_for_large=config.check_for_large_grads,
        )
    if part.bucket.gradient_scaling_factor != 1.0:
        part.data.mul_(part.bucket.gradient_scaling_factor)
