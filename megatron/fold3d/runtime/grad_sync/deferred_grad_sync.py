"""``--backward-share``: gradient sync where some segments' DP.sync reaches into the next iteration.

`DeferredSync` handles these segments; `GradSync` handles the others, if there are any.
"""

from megatron.fold3d.plan.ir import Action, Op, Plan
from megatron.fold3d.plan.passes.early_grad_sync import stages_in_parts
from megatron.fold3d.plan.passes.gather_later import gather_later
from megatron.fold3d.plan.passes.grad_sync import deferred_stages
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.runtime.feature import Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.ddp_sync import GradSync
from megatron.fold3d.runtime.grad_sync.deferred_sync import DeferredSync


class DeferredGradSync(GradSync):
    """Gradient sync of one rank, which leaves its deferred segments to `DeferredSync`.

    Args:
        deferred: owns reductions and optimizer steps across iterations.
        places_gathers: whether `revise_plan` may move all-gathers of parameters.
    """

    preparing = "WAIT_GRAD before evaluation"

    def __init__(self, deferred: DeferredSync, *, places_gathers: bool = False) -> None:
        super().__init__()
        self._deferred = deferred
        self._places_gathers = places_gathers
        self._revised: dict[tuple[int, tuple[int, ...]], tuple[Plan, Plan]] = {}
        self._deferred_segments: frozenset[int] = frozenset()
        self._plan_gathers = False

    def revise_plan(self, plan: Plan, rank: int) -> Plan:
        """Move this rank's all-gathers to where their reduce-scatters should have ended."""
        if not self._places_gathers:
            return plan
        forwards = self._deferred.forwards_before_gathers(plan.num_microbatches)
        if not any(forwards):
            return plan
        key = id(plan), forwards
        if key not in self._revised:
            stages = range(rank, plan.num_stages, plan.num_ranks)
            revised = gather_later(plan, dict(zip(stages, forwards, strict=True)))
            verify(revised)
            self._revised[key] = plan, revised  # the plan, so that nothing else gets its id
        return self._revised[key][1]

    def prepare(self, iteration: Iteration) -> None:
        """Begin an iteration; take all due steps if it is an evaluation or defers nothing."""
        stages = deferred_stages(iteration.program)
        if iteration.trains and stages:
            self._deferred.prepare(iteration.chunks, iteration.groups)
        else:
            self._deferred.drain()
        self._deferred_segments = frozenset(s // iteration.plan.num_ranks for s in stages)
        self._plan_gathers = any(action.op is Op.GATHER_PARAM for action in iteration.program)
        super().prepare(iteration)

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return the handlers of DP.sync, with that of slices between weight gradients."""
        table = super().handlers(iteration, inner)
        if not stages_in_parts(iteration.program):
            return table

        def start_early(action: Action) -> None:
            chunk = self._chunks[iteration.segment(action)]
            self._deferred.start_early(chunk, iteration.unfinished.get(action.stage, ()))

        return {**table, Op.REDUCE_SLICE: start_early}

    def release(self, segment: int) -> None:
        """Let DDP's hooks reduce the gradients of a segment that is not deferred."""
        if segment not in self._deferred_segments:
            super().release(segment)

    def start_reduction(self, segment: int) -> None:
        """Start a segment's reductions: the backward share if it is deferred, else all of them."""
        if segment in self._deferred_segments:
            self._deferred.start_grad_sync(self._chunks[segment])
        else:
            super().start_reduction(segment)

    def wait(self, segment: int) -> None:
        """Wait for a segment's reduction; a deferred segment's is that of the iteration before."""
        if segment not in self._deferred_segments:
            super().wait(segment)
            return
        was_due = self._deferred.finish_step(self._chunks[segment])
        if was_due and not self._plan_gathers:
            self._deferred.gather(self._chunks[segment])
        self._quiet[segment].close()
        self._hush(segment)  # zeroing the gradients resets DDP's state and re-enables its hooks

    def gather(self, segment: int) -> None:
        """Start to gather a segment's parameters; behind a deferred one, start the next's DP.sync.

        In the first iteration there is nothing to gather: every replica has loaded all parameters.
        """
        if segment not in self._deferred_segments:
            super().gather(segment)
        elif self._gathers:
            self._deferred.gather(self._chunks[segment])

    def drain(self, iteration: Iteration) -> None:
        """Start the reductions that the next forward needs first; call ``finalize_model_grads``."""
        if iteration.trains and self._deferred_segments:
            self._deferred.finish_backward()
        super().drain(iteration)

    def close(self, error: BaseException | None) -> None:
        """Take the steps that are due."""
        self._deferred.close(error)
