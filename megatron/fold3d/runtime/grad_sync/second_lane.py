"""DP.sync for GPUs whose streams share one hardware queue: two communicators in turns.

In such a queue a reduction that waits for the one before it blocks computation. NCCL runs the
collectives of a communicator in one stream, so with one communicator for even segments and one for
odd segments, a reduction can be launched while the one before it still runs:

    one communicator   compute  .. 3B │ 2B 2B │          │ 1B 1B │     3 is reduced for longer than
                       DP.sync        └── 3 ─────────────┘── 2 ──      the backwards of 2 take
    two communicators  compute  .. 3B │ 2B 2B │ 1B 1B │ ..
                       DP.sync        └── 3 ────────────┘
                                              └── 2 ────────────

All-gathers stay in Megatron's own group. Two that share the link would both end late, and the
forward needs the first of them first.

**No GPU has run this.**
"""

from collections.abc import Mapping

import torch.distributed as dist

from megatron.fold3d.plan.device_queues import reduced_apart
from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import (
    Ranks,
    bucket_groups,
    connect,
    group_of,
    ranks_of,
    set_group,
)


class SecondLane(Feature):
    """Process groups for the reductions of odd segments, over the ranks of Megatron's."""

    def __init__(self) -> None:
        self._groups: Mapping[Ranks, dist.ProcessGroup] = {}
        self._is_connected = False

    def prepare(self, iteration: Iteration) -> None:
        """Make the process groups at the start of the first training iteration."""
        if not self._is_connected:
            self._is_connected = True
            odd = map(group_of, bucket_groups(*iteration.chunks[1::2]))
            several = [group for group in odd if group.size() > 1]
            self._groups = connect(several, iteration.device)

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return a wrapper that sets our groups for the rest of the iteration.

        It does so right before a segment's last backward, in which DDP's hooks may start to reduce.
        By then the segment's all-gathers have ended.
        """
        last = {a.stage: a for a in iteration.program if a.op is Op.BACKWARD}
        switches = {
            last[stage] for stage in reduced_apart(iteration.program, iteration.plan.num_ranks)
        }

        def backward(action: Action) -> None:
            chunks = (iteration.chunks[iteration.segment(action)],) if action in switches else ()
            for bucket_group in bucket_groups(*chunks):
                megatrons = group_of(bucket_group)
                if (ours := self._groups.get(ranks_of(megatrons))) is not None:
                    set_group(bucket_group, ours)
                    iteration.ends.callback(set_group, bucket_group, megatrons)
            inner[Op.BACKWARD](action)

        return {Op.BACKWARD: backward}
