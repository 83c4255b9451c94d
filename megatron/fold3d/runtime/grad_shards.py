"""``--shard-segments gradients``: a segment's gradients are whole only until they are reduced.

With a distributed optimizer a replica steps with its shard of the reduced gradients. This feature
keeps a copy of that shard and frees the storage of DDP's gradient buffer, of which the parameters'
``main_grad`` are views. Before a segment's first backward it allocates the storage again, zeroed.

    segments 0, 1, 2 and 3 of a rank; a reduce-scatter is drawn from its start to its wait

    compute         F F F F │ 3B 3B │ 2B 2B │ 1B 1B │ 0B 0B         finalize    optimizer
    reduce-scatter                   ───3────┘
                                             ───2────┘
    whole           none      3       2, 3    1, 2    0, 1          all: each replica its shard

With ``--backward-share`` a segment's gradients stay whole until the next iteration. Right before
its forwards they are reduced and its step is taken; then no copy of a shard is kept:

    compute         0F 0F │ 1F 1F │ 2F 2F │ 2B 2B │ 1B 1B │ 0B 0B
    reduce-scatter  ──1───┘   ──2─┘                 ───2──── ──1─── ──0──
    whole           1, 2    2       none    2       1, 2    all

Keeps one invariant: from Megatron's ``finalize_model_grads`` to the next iteration every buffer is
allocated and holds this replica's shard, where a reduce-scatter leaves it. Megatron sums some
gradients over pipeline or tensor-parallel ranks, element by element. These ranks own the same shard
of the buffer, so the sums in the shard are right. The rest of the buffer is never read.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.fold3d.plan.ir import Action, Op, carried
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration
from megatron.fold3d.runtime.shard_buffers import allocate, free, own_shards, sharded_buffers


class GradShards(Feature):
    """The gradients of one rank's model chunks; between uses only shards of them, or nothing."""

    draining = "the return of its gradient shards to Megatron's buffers"

    def __init__(self) -> None:
        self._chunks: Sequence[Any] = ()
        # By segment that has no buffers: its shards, one per bucket; none before its backwards.
        self._kept: dict[int, list[torch.Tensor]] = {}

    def prepare(self, iteration: Iteration) -> None:
        """Before a training iteration, free the gradients that Megatron has zeroed.

        A carried segment's gradients may still be needed by the last iteration's step.
        """
        if iteration.trains:
            self._chunks = iteration.chunks
            late = self._carried_segments(iteration)
            for segment in range(len(self._chunks)):
                if segment not in late:
                    self._free(segment, [])

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return the handlers that allocate and free gradients, in training."""
        if not iteration.trains:
            return {}
        run_backward = inner[Op.BACKWARD]
        late = self._carried_segments(iteration)

        def backward(action: Action) -> None:
            segment = iteration.segment(action)
            if self._kept.pop(segment, None) is not None:
                for buffer in sharded_buffers(self._chunks[segment], "grad_data"):
                    allocate(buffer)
                    buffer.zero_()
            run_backward(action)

        def free(action: Action) -> None:
            segment = iteration.segment(action)
            needed = () if segment in late else own_shards(self._chunks[segment], "grad_data")
            self._free(segment, [shard.clone() for shard in needed])

        return {Op.BACKWARD: backward, Op.FREE_GRAD: free}

    def drain(self, iteration: Iteration) -> None:
        """Allocate whole buffers, with this replica's shards, for ``finalize_model_grads``."""
        for segment in list(self._kept):
            chunk, shards = self._chunks[segment], self._kept.pop(segment)
            for buffer in sharded_buffers(chunk, "grad_data"):
                allocate(buffer)
            for own, shard in zip(own_shards(chunk, "grad_data"), shards, strict=True):
                own.copy_(shard)

    @staticmethod
    def _carried_segments(iteration: Iteration) -> frozenset[int]:
        """Return the segments whose gradients are freed after their step, in the next iteration."""
        num_ranks = iteration.plan.num_ranks
        return frozenset(stage // num_ranks for stage in carried(iteration.program))

    def _free(self, segment: int, shards: list[torch.Tensor]) -> None:
        self._kept[segment] = shards
        for buffer in sharded_buffers(self._chunks[segment], "grad_data"):
            free(buffer)
