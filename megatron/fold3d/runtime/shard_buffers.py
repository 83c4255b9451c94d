"""``--shard-segments``: a segment's parameters and gradients are whole only while they are used.

Each replica's optimizer owns a shard of them. They are views of flat buffers, in which Megatron's
DDP gathers and reduces. `ShardBuffers` frees a buffer's storage after the segment's last use, but
for a copy of this replica's shard, and allocates it again before the next use. Views, DDP and the
optimizer keep referring to the same storage object.

    segments of a rank; a collective is drawn from its start to its wait

    compute         0F 0F │ 1F 1F │ 2F 2F 2B 2B │ 1B 1B │ 0B 0B     optimizer
    all-gather      ─1─┘   ───2──┘               ───0──┘
    whole           0, 1    1, 2    1, 2          0, 1    0         all: it writes each shard

    compute         F F F F │ 3B 3B │ 2B 2B │ 1B 1B │ 0B 0B         finalize    optimizer
    reduce-scatter                   ───3────┘
                                             ───2────┘
    whole           none      3       2, 3    1, 2    0, 1          all: each replica its shard

With ``step=next`` a segment's gradients stay whole until the next iteration. They are
reduced there, and the step is taken right before the all-gather, in a parameter buffer that is
allocated for it. Then no copy of a gradient shard is kept:

    compute         0F 0F │ 1F 1F │ 2F 2F │ 2B 2B │ 1B 1B │ 0B 0B
    reduce-scatter  ──1───┘   ──2─┘                 ───2──── ──1─── ──0──
    whole           1, 2    2       none    2       1, 2    all

Keeps one invariant: between iterations every buffer is allocated and holds at least this replica's
shard: of parameters as after Megatron's own step with ``--overlap-param-gather``, of gradients from
``finalize_model_grads`` on, where a reduce-scatter leaves it. So evaluation, checkpoints and
everything else that Megatron does between iterations work as without this feature. Megatron sums
some gradients over pipeline or tensor-parallel ranks, element by element. These ranks own the same
shard of the buffer, so the sums in the shard are right. The rest of the buffer is never read.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from megatron.core.distributed.param_and_grad_buffer import shard_buffer

from megatron.fold3d.plan.ir import Action, Op, carried
from megatron.fold3d.plan.ops import FREE_OPS, GATHER_OPS
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, first_layer_first

Data = Literal["param_data", "grad_data"]


class ShardBuffers(Feature):
    """The parameters or gradients of one rank's model chunks, in shards between their uses.

    A run that frees both has two of it, around the gradient sync: parameters are allocated before
    it takes a step, and gradients before it hands them to ``finalize_model_grads``.

    Args:
        data: which tensor of each of Megatron's buffers is freed.
    """

    def __init__(self, data: Data) -> None:
        self.data = data
        name = "parameter" if data == "param_data" else "gradient"
        self.draining = f"the return of its {name} shards to Megatron's buffers"
        self._chunks: Sequence[Any] = ()
        self._late: set[int] = set()  # segments whose step is taken in the next iteration
        # By segment that is freed: its shards, one per bucket; none of gradients that are zero.
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._awaited: set[int] = set()  # segments whose next computation waits for an all-gather

    def prepare(self, iteration: Iteration) -> None:
        """Before an iteration, keep shards of parameters, nothing of zeroed gradients.

        A carried segment's gradients may still be needed by the last iteration's step.
        """
        self._chunks = iteration.chunks
        self._late = {stage // iteration.plan.num_ranks for stage in carried(iteration.program)}
        for segment in range(len(self._chunks)):
            if self.data == "param_data":
                self._free(segment)
            elif segment not in self._late:
                self._free(segment, keep=False)

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return the handlers that allocate, gather and free.

        A computation waits for the parameters that it reads, unless DDP's hooks do.
        """
        of_data = self._of_params if self.data == "param_data" else self._of_grads
        return of_data(iteration, inner)

    def drain(self, iteration: Iteration) -> None:
        """Give Megatron whole buffers, which hold this replica's shards.

        Before Megatron's hooks gather parameters, which they do from its first step on, all shards
        are gathered here: nobody would do it behind a step that is skipped.
        """
        freed = sorted(self._kept)
        for segment in freed:
            self._restore(segment)
        if self.data == "grad_data" or iteration.hooks_wait:
            return
        for bucket_group in bucket_groups(*(self._chunks[segment] for segment in freed)):
            bucket_group.start_param_sync(force_sync=True)
            bucket_group.param_gather_dispatched = False

    def _of_params(self, iteration: Iteration, inner: Handlers) -> Handlers:
        def compute(action: Action) -> None:
            self._wait(iteration.segment(action))
            inner[action.op](action)

        def step(action: Action) -> None:
            segment = iteration.segment(action)
            if segment in self._late:  # the optimizer writes a shard, or has nothing to do yet
                self._restore(segment)
            inner[Op.STEP](action)

        def gather(action: Action) -> None:
            segment, again = iteration.segment(action), action.op is Op.ALL_GATHER_B
            if segment in self._late and iteration.hooks_wait and not again:
                # Not gathered, even if DDP has gathered it, say for an evaluation.
                for bucket_group in bucket_groups(self._chunks[segment]):
                    bucket_group.param_gather_dispatched = False
                inner[Op.ALL_GATHER](action)
                return
            self._restore(segment)
            for bucket_group in first_layer_first(self._chunks[segment]):
                bucket_group.start_param_sync()
            if again or not iteration.hooks_wait:
                self._awaited.add(segment)

        return {
            **dict.fromkeys((Op.FORWARD, Op.BACKWARD, Op.RECOMPUTE), compute),
            Op.STEP: step,
            **dict.fromkeys(GATHER_OPS, gather),
            **dict.fromkeys(FREE_OPS, lambda action: self._free(iteration.segment(action))),
        }

    def _of_grads(self, iteration: Iteration, inner: Handlers) -> Handlers:
        def backward(action: Action) -> None:
            segment = iteration.segment(action)
            if self._kept.pop(segment, None) is not None:
                self._allocate(segment)
                for buffer in self._buffers(segment):
                    buffer.zero_()
            inner[Op.BACKWARD](action)

        def free_grad(action: Action) -> None:
            segment = iteration.segment(action)
            self._free(segment, keep=segment not in self._late)

        return {Op.BACKWARD: backward, Op.FREE_GRAD: free_grad}

    def _free(self, segment: int, *, keep: bool = True) -> None:
        """Free the segment's storages; ``keep`` copies of this replica's shards.

        The current stream must have waited for all work of other streams on the buffers.
        """
        kept = self._own_shards(segment) if keep else ()
        self._kept[segment] = [shard.clone() for shard in kept]
        for buffer in self._buffers(segment):
            buffer.untyped_storage().resize_(0)

    def _allocate(self, segment: int) -> None:
        """Allocate the segment's freed storages: undefined, to be written on this stream."""
        for buffer in self._buffers(segment):
            buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())

    def _restore(self, segment: int) -> None:
        """Allocate a freed segment's storages, and put this replica's shards into them."""
        if (kept := self._kept.pop(segment, None)) is None:
            return
        self._allocate(segment)
        for own, shard in zip(self._own_shards(segment), kept, strict=True):
            own.copy_(shard)

    def _wait(self, segment: int) -> None:
        if segment not in self._awaited:
            return
        self._awaited.remove(segment)
        for bucket_group in bucket_groups(self._chunks[segment]):
            bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)

    def _buffers(self, segment: int) -> Iterator[torch.Tensor]:
        """Yield the flat buffers of a segment that are sharded over replicas.

        Each is ``[num_elements]``, padded to a multiple of the number of replicas. Parameters have
        the model's dtype, gradients the one in which DDP reduces. Megatron's DDP owns the buffers.
        """
        chunk = self._chunks[segment]
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if buffer.data_parallel_world_size > 1:
                yield getattr(buffer, self.data)

    def _own_shards(self, segment: int) -> Iterator[torch.Tensor]:
        """Yield one view per bucket: the shard of it that belongs to this replica's optimizer.

        Each is ``[num_elements / num_replicas]``, a contiguous part of a buffer that DDP owns.
        """
        for bucket_group in bucket_groups(self._chunks[segment]):
            size = bucket_group.intra_distributed_optimizer_instance_size
            rank = bucket_group.intra_distributed_optimizer_instance_rank
            for bucket in bucket_group.buckets if size > 1 else ():
                yield shard_buffer(getattr(bucket, self.data), size)[rank]
