"""DP.sync in the slices of the plan, within an iteration or reaching into the next one.

The plan says when a slice starts and where it ends, in thousandths of the stage's gradients. The
contiguous gradients of a slice are one collective: where all streams of a GPU share one hardware
queue, two collectives in a row would block computation.

Keeps one invariant: an action starts to reduce the gradients of its stage that lie before the
action's end and have not been started. So each gradient is reduced once, even if a wait has already
started the rest.
"""

from collections.abc import Callable, Collection, Container, Sequence
from typing import Any

from megatron.fold3d.plan.ir import WHOLE, Action, Op, Plan
from megatron.fold3d.plan.passes.early_grad_sync import stages_in_parts
from megatron.fold3d.plan.passes.grad_sync import carried_over, slices_of
from megatron.fold3d.plan.passes.sliced_grad_sync import slice_grad_sync
from megatron.fold3d.runtime.feature import Handler, Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.ddp_sync import GradSync
from megatron.fold3d.runtime.grad_sync.deferred_grad_sync import DeferredGradSync
from megatron.fold3d.runtime.grad_sync.deferred_sync import DeferredSync
from megatron.fold3d.runtime.grad_sync.reductions import Reductions
from megatron.fold3d.runtime.trace.recorder import Recorder, no_end

UNCUT = 1 << 60
"""More bytes than any bucket has, so that the plan's slices are not cut again."""


class SlicedGradSync(GradSync):
    """Gradient sync of one rank in the plan's slices; DDP's hooks start none of these.

    Slices are reduced in the process groups of their buckets.

    Args:
        recorder: the recorder of the trace, if there is one.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        super().__init__()
        self._recorder = recorder
        self._reductions: Reductions | None = None
        self._iteration: Iteration | None = None
        self._sliced: Collection[int] = ()  # segments

    def prepare(self, iteration: Iteration) -> None:
        """Begin an iteration."""
        self._iteration = iteration
        slices = slices_of(iteration.program)
        ranks = iteration.plan.num_ranks
        early = stages_in_parts(iteration.program)  # those are `EarlySync`'s
        self._sliced = {
            stage // ranks for stage, its in slices.items() if len(its) > 1 and stage not in early
        }
        super().prepare(iteration)

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return the handlers of DP.sync, with those of slices."""
        table = super().handlers(iteration, inner)
        return {**table, **_of_slices(self, iteration, table[Op.REDUCE_GRAD], self._sliced)}

    def release(self, segment: int) -> None:
        """Let DDP's hooks reduce the gradients of a segment that the plan does not slice."""
        if segment not in self._sliced:
            super().release(segment)

    def start_reduction(self, segment: int) -> None:
        """Make a segment's complete gradients ready for its slices."""
        if segment not in self._sliced:
            super().start_reduction(segment)
        elif self._no_sync is not None:
            reductions, chunk = self._connected(), self._chunks[segment]
            reductions.start_slices(chunk, reductions.cut(chunk), 0.0)

    def start_until(self, segment: int, end: int) -> None:
        """Start to reduce a segment up to ``end`` thousandths."""
        if self._reductions is not None:
            self._reductions.start_until(self._chunks[segment], end / WHOLE)

    def wait(self, segment: int) -> None:
        """Wait for a segment's reduction."""
        if segment in self._sliced and self._reductions is not None:
            self._reductions.wait(self._chunks[segment])
        super().wait(segment)

    def _connected(self) -> Reductions:
        if self._reductions is None:
            self._reductions = Reductions(UNCUT, self._observe, is_planned=True)
            self._reductions.connect(self._chunks, frozenset(), groups={})
        return self._reductions

    def _observe(self, chunk: Any, num_bytes: int) -> list[Callable[[], None]]:
        if self._recorder is None or self._iteration is None:
            return []
        segment = list(self._chunks).index(chunk)
        stage = segment * self._iteration.plan.num_ranks + self._iteration.rank
        end = self._recorder.open_span(Action(stage, Op.REDUCE_GRAD), "grad_sync")
        return [end] if end is not no_end else []


class SlicedDeferredGradSync(DeferredGradSync):
    """Gradient sync of one rank whose deferred segments are reduced in the plan's slices.

    Args:
        deferred: owns reductions and optimizer steps across iterations.
    """

    def __init__(self, deferred: DeferredSync) -> None:
        super().__init__(deferred)
        self._made: dict[tuple[Plan, Sequence[float]], Plan] = {}

    def revise_plan(self, plan: Plan, rank: int) -> Plan:
        """Cut DP.sync of this rank by its measured shares, unless the plan has slices already."""
        if plan.has(Op.REDUCE_SLICE):
            return plan
        own = self._deferred.shares(plan.num_segments)
        key = plan, own
        if key not in self._made:
            shares = [share for share in own for _ in range(plan.num_ranks)]
            sliced = slice_grad_sync(plan, shares).programs[rank]
            programs = (*plan.programs[:rank], sliced, *plan.programs[rank + 1 :])
            self._made = {key: Plan(programs)}
        return self._made[key]

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return the handlers of DP.sync, with those of slices."""
        table = super().handlers(iteration, inner)
        reduce = table[Op.REDUCE_GRAD]
        return {**table, **_of_slices(self, iteration, reduce, self._deferred_segments)}

    def start_until(self, segment: int, end: int) -> None:
        """Start to reduce a deferred segment up to ``end`` thousandths."""
        self._deferred.start_until(self._chunks[segment], end / WHOLE)


def _of_slices(
    sync: SlicedGradSync | SlicedDeferredGradSync,
    iteration: Iteration,
    make_ready: Handler,
    segments: Container[int],
) -> Handlers:
    """Return the handlers of REDUCE_SLICE and REDUCE_GRAD of one iteration.

    Args:
        sync: starts slices.
        iteration: the one that is about to run.
        make_ready: prepares the gradients of a sliced segment; starts those of any other segment.
        segments: the segments whose gradients the plan slices.
    """
    late = carried_over(iteration.program)
    ready: set[int] = set()  # segments

    def reduce(action: Action) -> None:
        segment = iteration.segment(action)
        if action not in late and segment not in ready:
            ready.add(segment)
            make_ready(action)
        if segment in segments:
            end = action.microbatch if action.op is Op.REDUCE_SLICE else WHOLE
            sync.start_until(segment, WHOLE if end is None else end)

    return {Op.REDUCE_SLICE: reduce, Op.REDUCE_GRAD: reduce}
