"""An upper bound on the global gradient norm, known before the gradients are reduced.

The norm of a sum is at most the sum of the norms. So the norm of the reduced gradients is at most
the sum of the replicas' norms before the reduction. One small all-reduce adds these up for all
gradients at once. If the bound shows that Megatron will neither clip nor skip the step, and that
no gradient overflows, the step need not wait for the reduced gradients.

Keeps one invariant: every rank gets the same numbers, and so takes the same decision.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import get_model_config

from megatron.fold3d.runtime.grad_sync.bucket_groups import (
    Ranks,
    bucket_groups,
    everyones_groups,
    group_of,
    is_sharded,
    make_groups,
    ranks_of,
)
from megatron.fold3d.runtime.grad_sync.pieces import Piece
from megatron.fold3d.runtime.grad_sync.stage_gradients import own_part

# Norms in fp32 are not exact, neither ours nor Megatron's. A sum of squares in which each term is
# rounded up to 100,000 times in sequence is off by 0.6% at most.
_SAFETY = 1.01

_MEGATRONS_EPSILON = 1e-6  # clip_grad_by_total_norm_fp32 divides by the norm and this


def is_conditional(config: Any) -> bool:
    """Return True if the norm decides, with this config, whether a step is clipped or skipped."""
    return bool(config.clip_grad > 0 or math.isfinite(config.grad_norm_skip_threshold))


@dataclass(frozen=True, slots=True)
class Bound:
    """Upper bounds on an iteration's gradients.

    Attributes:
        norm: the global gradient norm, as Megatron computes it.
        peak: the largest absolute value among gradients reduced in fp16, with the loss scale still
            applied. fp16 can overflow although the norm is finite; other types cannot.
    """

    norm: float
    peak: float

    def allows_late_steps(self, config: Any) -> bool:
        """Return True if Megatron's optimizer is certain to take this step without clipping."""
        finite = torch.finfo(torch.float32).max
        limit = min(config.clip_grad or finite, config.grad_norm_skip_threshold, finite)
        unclipped = self.norm + _MEGATRONS_EPSILON <= limit
        # Neither holds for NaN.
        return unclipped and self.peak <= torch.finfo(torch.float16).max


class NormBound:
    """The gradient norms of one iteration, collected as they become known.

    Each process group of reductions has one slot per segment, for gradients that are not reduced
    yet, and one more slot for gradients that are. The last slot holds a squared norm, to which each
    rank adds the square of the norm of the gradients that it counts.
    """

    def __init__(self, chunks: Sequence[Any], device: torch.device) -> None:
        groups = everyones_groups({ranks_of(group_of(b)) for b in bucket_groups(*chunks)})
        self._reduced_slot = len(chunks)  # follows those of the segments
        num_slots = len(chunks) + 1
        self._first_slot = {ranks: i * num_slots for i, ranks in enumerate(groups)}
        size = max(1, len(groups)) * num_slots  # of zeros alone where nothing is trained
        self._slots = torch.zeros(2, size, dtype=torch.float64, device=device)
        self._norms, self._peaks = self._slots
        in_fp32 = chunks[0].ddp_config.grad_reduce_in_fp32
        self._in_fp16 = get_model_config(chunks[0]).fp16 and not in_fp32
        world: Any = dist.group.WORLD
        (self._world,) = make_groups([world]).values()  # its own, so that it stands in no queue

    def clear(self) -> None:
        """Begin an iteration: no norm is known. The one before may have ended without a step."""
        self._slots.zero_()

    @torch.no_grad()
    def add(self, segment: int, parts: Iterable[Piece]) -> None:
        """Record the norms of some of a segment's slices, which are about to be reduced."""
        by_ranks: dict[Ranks, list[torch.Tensor]] = defaultdict(list)
        for part in parts:
            by_ranks[ranks_of(part.group)].extend(part.views)
        for ranks, data in by_ranks.items():
            slot = self._first_slot[ranks] + segment
            rounding = (1 + torch.finfo(data[0].dtype).eps) ** len(ranks)  # the rounding of the sum
            norm = _norm(data) * rounding
            self._norms[slot] = torch.hypot(self._norms[slot], norm)
            if self._in_fp16:
                peaks = [torch.linalg.vector_norm(part, torch.inf) for part in data]
                peak = (torch.stack(peaks).max() * rounding).double()
                self._peaks[slot] = torch.maximum(self._peaks[slot], peak)

    @torch.no_grad()
    def add_reduced(
        self,
        stepped: Iterable[Any],
        deferred: Iterable[Any],
        reduced_in_iteration: AbstractSet[torch.nn.Parameter],
        scaling: torch.Tensor | float = 1.0,
    ) -> None:
        """Record the norms of reduced gradients.

        These are all gradients of ``stepped`` chunks, and the gradients of ``reduced_in_iteration``
        in ``deferred`` chunks, which are still to be multiplied by ``scaling``. All replicas hold
        the same values, so only the first rank of each group records them. With the distributed
        optimizer each rank records its own shard. If Megatron's norm counts a parameter that
        several ranks hold only once, it is counted once here too.

        ``scaling`` is a number or a 0-d tensor on the device, valid on the current stream.
        """
        for chunks, reduced, factor in (
            (stepped, None, 1.0),
            (deferred, reduced_in_iteration, scaling),
        ):
            by_ranks: dict[Ranks, list[torch.Tensor]] = defaultdict(list)
            for group in bucket_groups(*chunks):
                by_ranks[ranks_of(group_of(group))] += [
                    gradient
                    for bucket in group.buckets
                    for parameter in bucket.params
                    if (reduced is None or parameter in reduced) and _is_counted_here(parameter)
                    for gradient in _counted_on_this_rank(group, bucket, parameter)
                ]
            for ranks, gradients in by_ranks.items():
                if gradients:
                    square = self._norms[self._first_slot[ranks] + self._reduced_slot]
                    square += (_norm(gradients) * factor) ** 2

    def total(self, loss_scale: float, scaling: torch.Tensor | float = 1.0) -> Bound:
        """Return the bound over all ranks.

        All ranks of the job call this together. Unreduced gradients are still to be multiplied by
        ``scaling``, as in `add_reduced`, so this multiplies their norms by it. The host blocks
        until the result is there.
        """
        dist.all_reduce(self._slots, group=self._world)
        norms = self._norms.view(-1, self._reduced_slot + 1)
        norms[:, : self._reduced_slot] *= scaling
        norms[:, self._reduced_slot].sqrt_()
        norm, peak = torch.stack([norms.norm(), self._peaks.max()]).tolist()
        return Bound(norm / loss_scale * _SAFETY, peak)


def _norm(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all parts, 0-d in fp64; each part's own norm is computed in fp32."""
    norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]
    return torch.stack(norms).double().square().sum().sqrt()


def _counted_on_this_rank(bucket_group: Any, bucket: Any, parameter: Any) -> Iterator[torch.Tensor]:
    """Yield the part of a parameter's reduced gradient that this replica counts, and no other."""
    group = group_of(bucket_group)
    if not is_sharded(bucket_group):
        if group.rank() == 0:
            yield parameter.main_grad
        return
    own = parameter.main_grad.view(-1)[own_part(bucket_group, bucket, parameter)]
    if own.numel():
        yield own


def _is_counted_here(parameter: torch.nn.Parameter) -> bool:
    """True if Megatron's norm may count this rank's copy of the parameter."""
    if not getattr(parameter, "allreduce", True):
        return True  # an expert's: its attributes do not always tell which ranks have copies
    return bool(
        param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
    )
