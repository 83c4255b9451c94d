"""``--replicate-optimizer``: gradient sync of segments that every replica steps in full.

Their gradients are all-reduced during the backward, and their forward needs no all-gather. So bytes
move from the forward, which is often too short for the all-gathers of all segments, to the
backward. This does not depend on the gradient norm, so it also works in a step that is clipped.

    segment 1 is replicated

    compute    .. 2F 2B     1B        0B        │ norm, steps │ 0F        1F        2F
    DP.sync             2rs ─── 1ar ────── 0rs ─│             │─ 0ag ─ 2ag ─

Keeps one invariant: between two steps a replicated segment's parameters are whole on every replica.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from megatron.fold3d.runtime.feature import Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups
from megatron.fold3d.runtime.grad_sync.ddp_sync import GradSync
from megatron.fold3d.runtime.grad_sync.other_shards import OtherShards

if TYPE_CHECKING:
    from megatron.fold3d.runtime.trace.recorder import Recorder

_MEGATRONS = "megatron.core.distributed.param_and_grad_buffer"


class ReplicatedSteps(GradSync):
    """Gradient sync of one rank, if every replica steps some of its segments in full.

    Args:
        segments: the segments that every replica steps; `choose` may change them.
        recorder: the recorder of the trace, if there is one.
    """

    def __init__(self, segments: Collection[int], recorder: "Recorder | None" = None) -> None:
        super().__init__(recorder)
        self._chosen = frozenset(segments)
        self._replicated: frozenset[int] = frozenset()  # in the latest training iteration
        self._whole: frozenset[int] | None = None  # behind the latest step; None is before any
        self._others: Sequence[OtherShards] | None = None
        logging.getLogger(_MEGATRONS).addFilter(_is_news)

    def choose(self, segments: Collection[int]) -> None:
        """From the next training iteration on, step these segments in full."""
        self._chosen = frozenset(segments)

    def prepare(self, iteration: Iteration) -> None:
        """Begin an iteration: all-reduce these segments' gradients, and gather nothing."""
        super().prepare(iteration)
        if not iteration.trains:
            return
        if self._replicated != self._chosen:
            self._replicated, self._others = self._chosen, None
        for segment in self._replicated:
            chunk: Any = self._chunks[segment]
            chunk.force_all_reduce = True  # Megatron resets it behind each iteration
            if self._whole is None or segment in self._whole:
                for bucket_group in bucket_groups(chunk):
                    bucket_group.param_gather_dispatched = True  # so that no hook starts it

    @contextmanager
    def widened(self, optimizer: Any) -> Iterator[None]:
        """Let Megatron's ``ChainedOptimizer`` step these segments in full, inside the block.

        All ranks of the job enter it together.
        """
        if self._others is None:
            chunks = [self._chunks[segment] for segment in sorted(self._replicated)]
            self._others = [
                OtherShards(part, chunks)
                for part in (optimizer.chained_optimizers if chunks else ())
                if not part.is_stub_optimizer
            ]
        with ExitStack() as stack:
            for others in self._others:
                stack.enter_context(others.widened())
            yield
        self._whole = self._replicated


def _is_news(record: logging.LogRecord) -> bool:
    """Drop the line that Megatron logs for each all-reduce with the distributed optimizer."""
    return "because force_all_reduce=True" not in record.getMessage()
