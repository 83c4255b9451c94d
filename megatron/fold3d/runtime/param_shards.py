"""``--shard-segments weights``: a segment's parameters are whole only while it computes.

Each replica holds a shard of a segment's parameters. The parameters are views of a buffer, into
which Megatron's DDP gathers them. This feature frees the buffer's storage after the segment's last
use, and allocates it again before the next all-gather. Views, gradient buffers and the optimizer
keep referring to the same storage object.

    segments 0, 1 and 2 of a rank; an all-gather is drawn from its start to its wait

    compute      0F 0F │ 1F 1F │ 2F 2F 2B 2B │ 1B 1B │ 0B 0B    optimizer
    all-gather   ─1─┘   ───2──┘               ───0──┘
    whole        0, 1    1, 2    1, 2          0, 1    0        all: it writes each shard

With ``--backward-share`` a segment's step may be taken right before its all-gather, in a buffer
that is allocated for it.

Keeps one invariant: between iterations every buffer is allocated and holds at least this replica's
shard, as after Megatron's own step with ``--overlap-param-gather``. So evaluation, checkpoints and
everything else that Megatron does between iterations work as without this feature.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.fold3d.plan.ir import Action, Op, carried
from megatron.fold3d.plan.ops import FREE_OPS, GATHER_OPS
from megatron.fold3d.runtime.feature import Feature, Handler, Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, first_layer_first
from megatron.fold3d.runtime.shard_buffers import allocate, free, own_shards, sharded_buffers


class ParamShards(Feature):
    """The parameters of one rank's model chunks, in shards between their uses."""

    draining = "the return of its parameter shards to Megatron's buffers"

    def __init__(self) -> None:
        self._chunks: Sequence[Any] = ()
        self._kept: dict[int, list[torch.Tensor]] = {}  # by segment that is freed, one per bucket
        self._awaited: set[int] = set()  # segments whose next computation waits for an all-gather
        self._hooks_wait = False

    def prepare(self, iteration: Iteration) -> None:
        """Before a training iteration, keep this replica's shards and free everything else."""
        if not iteration.trains:
            return
        self._chunks = iteration.chunks
        # DDP's hooks wait for each layer's own all-gather, except in Megatron's first iteration.
        self._hooks_wait = iteration.config.param_sync_func is not None
        for segment in range(len(self._chunks)):
            self._free(segment)

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return the handlers that gather and free parameters, in training.

        A computation waits for what it reads, unless DDP's hooks do.
        """
        if not iteration.trains:
            return {}
        late = carried(iteration.program)

        def waiting(op: Op) -> Handler:
            def compute(action: Action) -> None:
                self._wait(iteration.segment(action))
                inner[op](action)

            return compute

        def step(action: Action) -> None:
            if action.stage in late:  # the optimizer writes a shard, or has nothing to do yet
                self._restore(iteration.segment(action))
            inner[Op.STEP](action)

        def gather(action: Action) -> None:
            segment = iteration.segment(action)
            again = action.op is Op.ALL_GATHER_B
            if action.stage in late and self._hooks_wait and not again:
                self._forget(segment)
                inner[Op.ALL_GATHER](action)
                return
            self._gather(segment)
            if again or not self._hooks_wait:
                self._awaited.add(segment)

        def free(action: Action) -> None:
            self._free(iteration.segment(action))

        return {
            **{op: waiting(op) for op in (Op.FORWARD, Op.BACKWARD, Op.RECOMPUTE)},
            Op.STEP: step,
            **dict.fromkeys(GATHER_OPS, gather),
            **dict.fromkeys(FREE_OPS, free),
        }

    def drain(self, iteration: Iteration) -> None:
        """Give the optimizer whole buffers, which hold this replica's shards."""
        if iteration.trains:
            for segment in range(len(self._chunks)):
                self._restore(segment)

    def _free(self, segment: int) -> None:
        """Keep copies of this replica's shards; free the storages of the segment's parameters."""
        chunk = self._chunks[segment]
        self._kept[segment] = [shard.clone() for shard in own_shards(chunk, "param_data")]
        for buffer in sharded_buffers(chunk, "param_data"):
            free(buffer)

    def _restore(self, segment: int) -> None:
        """Allocate a freed segment's storages, and put this replica's shards into them."""
        chunk = self._chunks[segment]
        if (kept := self._kept.pop(segment, None)) is None:
            return
        for buffer in sharded_buffers(chunk, "param_data"):
            allocate(buffer)
        for own, shard in zip(own_shards(chunk, "param_data"), kept, strict=True):
            own.copy_(shard)

    def _gather(self, segment: int) -> None:
        """Start the all-gather of a segment's parameters, those of its first layers first."""
        self._restore(segment)
        for bucket_group in first_layer_first(self._chunks[segment]):
            bucket_group.start_param_sync()

    def _forget(self, segment: int) -> None:
        """Mark a segment as not gathered, even if DDP has gathered it, say for an evaluation."""
        for bucket_group in bucket_groups(self._chunks[segment]):
            bucket_group.param_gather_dispatched = False

    def _wait(self, segment: int) -> None:
        if segment not in self._awaited:
            return
        self._awaited.remove(segment)
        for bucket_group in bucket_groups(self._chunks[segment]):
            bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)
