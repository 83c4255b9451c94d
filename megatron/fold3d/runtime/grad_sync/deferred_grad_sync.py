"""``--backward-share``: gradient sync where some segments' DP.sync reaches into the next iteration.

`DeferredSync` handles these segments; `GradSync` handles the others, if there are any.
"""

from collections.abc import Container

from megatron.fold3d.plan.passes.grad_sync import deferred_stages
from megatron.fold3d.runtime.feature import Iteration
from megatron.fold3d.runtime.grad_sync.ddp_sync import GradSync
from megatron.fold3d.runtime.grad_sync.deferred_sync import DeferredSync


class DeferredGradSync(GradSync):
    """Gradient sync of one rank, which leaves its deferred segments to `DeferredSync`.

    Args:
        deferred: owns reductions and optimizer steps across iterations.
    """

    preparing = "WAIT_GRAD before evaluation"

    def __init__(self, deferred: DeferredSync) -> None:
        super().__init__()
        self._deferred = deferred
        self._deferred_segments: Container[int] = ()

    def prepare(self, iteration: Iteration) -> None:
        """Begin an iteration; before an evaluation, take the steps that are due."""
        if iteration.trains:
            self._deferred.prepare(iteration.chunks, iteration.groups)
        else:
            self._deferred.drain()
        stages = deferred_stages(iteration.program)
        self._deferred_segments = {stage // iteration.plan.num_ranks for stage in stages}
        super().prepare(iteration)

    def release(self, segment: int) -> None:
        """Let DDP's hooks reduce the gradients of a segment that is not deferred."""
        if segment not in self._deferred_segments:
            super().release(segment)

    def start_reduction(self, segment: int) -> None:
        """Start to reduce a segment: its backward share if it is deferred, else all of it."""
        if segment in self._deferred_segments:
            self._deferred.start(self._chunks[segment])
        else:
            super().start_reduction(segment)

    def wait(self, segment: int) -> None:
        """Wait for a segment's reduction; if it is deferred, for that of the last iteration."""
        if segment not in self._deferred_segments:
            super().wait(segment)
            return
        self._deferred.finish_step(self._chunks[segment])
        self._quiet[segment].close()
        self._hush(segment)  # zeroing the gradients resets DDP's state and re-enables its hooks

    def drain(self, iteration: Iteration) -> None:
        """Start what the next forward needs first, then call ``finalize_model_grads``."""
        if iteration.trains:
            self._deferred.finish_backward()
        super().drain(iteration)

    def close(self, error: BaseException | None) -> None:
        """Take the steps that are due."""
        self._deferred.close(error)
