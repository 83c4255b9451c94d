"""The gradient sums of model chunks, in parts that start at different times.

Sums are all-reduces or, with the distributed optimizer, reduce-scatters. `StageGradients` says
which gradients are complete, and in which order; this module sends them.

Keeps two invariants. A part starts all complete gradients before its end that have not been
started, so none is lost or sent twice. Every replica of a chunk starts the same collectives in the
same order, in process groups that nothing else uses at that time.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron.fold3d.plan.ir import WHOLE, Action
from megatron.fold3d.plan.ops import SUM_OPS
from megatron.fold3d.runtime.device import Launched
from megatron.fold3d.runtime.events import Events
from megatron.fold3d.runtime.feature import Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import (
    Ranks,
    bucket_groups,
    group_of,
    ranks_of,
    set_group,
    start_gathers,
)
from megatron.fold3d.runtime.grad_sync.pieces import Piece
from megatron.fold3d.runtime.grad_sync.stage_gradients import StageGradients, sums_to_shards

UNCUT = 1 << 60
"""More bytes than any bucket has: the plan's parts are not cut again."""


class Sums:
    """The gradient sums in flight of one rank's model chunks.

    If ``groups`` has none over a bucket's ranks, gradients are summed in the bucket's own group.

    Args:
        chunks: the model chunks; without any there is nothing to sum.
        slice_bytes: the most that is all-reduced at once.
    """

    def __init__(
        self,
        recorder: Events,
        chunks: Sequence[Any] = (),
        kept: AbstractSet[torch.nn.Parameter] = frozenset(),
        slice_bytes: int = UNCUT,
        groups: Mapping[Ranks, dist.ProcessGroup] | None = None,
    ) -> None:
        self._recorder, self._groups = recorder, groups or {}
        self._names: dict[Any, Action] = {}  # by chunk, of the sum of all of its gradients
        self.gradients = {
            chunk: StageGradients(chunk, kept, slice_bytes, self._group_of) for chunk in chunks
        }
        # By chunk that is not waited for: the works of each part, and what ends the part's event.
        self._in_flight: dict[Any, list[tuple[Sequence[Launched], Callable[[], None]]]] = {}
        self._keeping: dict[Any, list[Any]] = {}

    def name_after(self, iteration: Iteration) -> None:
        """Give each chunk's sum the name that an iteration's plan has for it."""
        self._names = {
            iteration.chunks[iteration.segment(action)]: action.until(WHOLE)
            for action in iteration.program
            if action.op in SUM_OPS
        }

    def complete(self, chunk: Any, unfinished: Collection[torch.Tensor] = ()) -> Sequence[Piece]:
        """Note which of a chunk's gradients are complete: see `StageGradients.complete`."""
        self._in_flight.setdefault(chunk, [])
        return self.gradients[chunk].complete(unfinished)

    def start_until(self, chunk: Any, end: int) -> None:
        """Start what lies before ``end`` thousandths of a chunk's gradients, if any is complete.

        If pieces were cut only where buckets end, this starts one collective per bucket.
        """
        if (in_flight := self._in_flight.get(chunk)) is None:
            return  # its step has waited for all, or none is complete
        if pieces := self.gradients[chunk].take(end):
            name = self._names[chunk].until(end)
            launched = self._recorder.collective(
                name, "grad_sync", lambda: [piece.reduce() for piece in pieces]
            )
            in_flight.append(launched)

    def start_left(self) -> None:
        """Start all that is complete and was not started, lowest chunk first."""
        for chunk in self.gradients:
            self.start_until(chunk, WHOLE)

    def is_running(self, chunk: Any) -> bool:
        """True from the first `complete` of a chunk's gradients until `wait` returns."""
        return chunk in self._in_flight

    def wait(self, chunk: Any) -> None:
        """Start what is left of a chunk, and wait for its sums, if any is in flight."""
        self.start_until(chunk, WHOLE)
        if (in_flight := self._in_flight.pop(chunk, None)) is not None:
            self.gradients[chunk].restart()
            for works, _ in in_flight:
                for work in works:
                    work.wait()
            self.gradients[chunk].copy_back(kept=False)
            for _, end in in_flight:
                end()

    def keep(self, chunk: Any) -> None:
        """Start to sum what Megatron reads, in its own process groups, where no part queues."""
        keeping = self._keeping.setdefault(chunk, [])
        for bucket_group in bucket_groups(chunk):
            pieces = self.gradients[chunk].kept(bucket_group)
            if sums_to_shards(chunk, bucket_group):
                keeping += [piece.reduce() for piece in pieces]
            elif pieces:
                with _coalescing_manager(group_of(bucket_group), async_ops=True) as works:
                    for piece in pieces:
                        piece.reduce()
                keeping.append(works)

    def finish_kept(self, chunk: Any) -> None:
        """Wait for what `keep` has started."""
        for work in self._keeping.pop(chunk, ()):
            work.wait()
        self.gradients[chunk].copy_back(kept=True)

    def gather(self, chunk: Any) -> None:
        """Start to gather a chunk's parameters, first layers first, in our process groups.

        Buckets whose all-gather has started or ended are skipped. DDP's hooks wait for the others
        in the forward. Without ``--overlap-param-gather`` there are no hooks, so this waits.
        """
        with ExitStack() as undo:
            for bucket_group in bucket_groups(chunk):
                undo.callback(set_group, bucket_group, group_of(bucket_group))
                set_group(bucket_group, self._group_of(bucket_group))
            start_gathers(chunk)

    def _group_of(self, bucket_group: Any) -> dist.ProcessGroup:
        megatrons = group_of(bucket_group)
        return self._groups.get(ranks_of(megatrons), megatrons)


def reduced_in_iteration(
    chunks: Sequence[Any], groups: ProcessGroupCollection
) -> frozenset[torch.nn.Parameter]:
    """Return the parameters of a rank's chunks whose gradients must be reduced in the iteration.

    ``finalize_model_grads`` sums these over pipeline or tensor-parallel ranks at its end. They have
    to be reduced by then, even if the rest of their model chunk is deferred.
    """
    return frozenset(parameter for chunk in chunks for parameter in _of_chunk(chunk, groups))


def _of_chunk(chunk: Any, groups: ProcessGroupCollection) -> Iterator[torch.nn.Parameter]:
    """Yield what two functions of Megatron 0.19.2 reduce: word embeddings, and norms with TP."""
    config = get_model_config(chunk)
    for name, parameter in chunk.named_parameters():
        if getattr(parameter, "shared_embedding", False) or (  # _allreduce_word_embedding_grads
            groups.tp.size() > 1  # _allreduce_non_tensor_model_parallel_grads
            and (
                getattr(parameter, "average_gradients_across_tp_domain", False)
                or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
                or (config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name))
            )
        ):
            yield parameter
