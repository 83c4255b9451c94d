"""``--backward-share``: gradient sync where some segments' DP.sync reaches into the next iteration.

`DeferredSync` handles these segments; `GradSync` handles the others, if there are any.
"""

from typing import TYPE_CHECKING

from megatron.fold3d.plan.ir import Action, Op, Plan, Program, carried
from megatron.fold3d.plan.ops import SUM_OPS
from megatron.fold3d.plan.passes.carried_grad_sync import share_grad_sync
from megatron.fold3d.plan.passes.early_grad_sync import stages_in_parts
from megatron.fold3d.plan.passes.gather_later import gather_later
from megatron.fold3d.plan.passes.sliced_grad_sync import slice_grad_sync
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.runtime.feature import Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.ddp_sync import GradSync
from megatron.fold3d.runtime.grad_sync.deferred_sync import DeferredSync
from megatron.fold3d.runtime.plans import Plans

if TYPE_CHECKING:
    from megatron.fold3d.runtime.trace.recorder import Recorder


class DeferredGradSync(GradSync):
    """Gradient sync of one rank, which leaves its carried segments to `DeferredSync`.

    Args:
        deferred: owns reductions and optimizer steps across iterations.
        plans: the plans of the run.
        slices: whether the plan starts DP.sync in slices, one before each computation.
        places_gathers: whether `revise_plan` may move all-gathers of parameters.
        recorder: the recorder of the trace, if there is one.
    """

    preparing = "STEP before evaluation"

    def __init__(
        self,
        deferred: DeferredSync,
        plans: Plans,
        *,
        slices: bool = False,
        places_gathers: bool = False,
        recorder: "Recorder | None" = None,
    ) -> None:
        super().__init__(recorder)
        self._deferred, self._plans = deferred, plans
        self._slices, self._places_gathers = slices, places_gathers
        self._revised: dict[tuple[int, tuple[float, ...], tuple[int, ...]], tuple[Plan, Plan]] = {}
        self._carried: frozenset[int] = frozenset()  # segments
        self._plan_gathers = False

    def choose_plan(self, plan: Plan, rank: int) -> Plan:
        """Return the plan of a free iteration, or that of one that may be clipped."""
        if self._plans.carries == self._deferred.is_free:
            return plan
        self._plans.carries = self._deferred.is_free
        return self._plans.training(plan.num_microbatches)

    def revise_plan(self, plan: Plan, rank: int) -> Plan:
        """Cut DP.sync by the latest shares, and move all-gathers behind what is left of it.

        What other ranks do is as if their shares were the same. A plan whose DP.sync is cut already
        stays as it is.
        """
        if not carried(plan.programs[rank]):
            return plan
        segments, ranks = plan.num_segments, plan.num_ranks
        forwards = (0,) * segments
        if self._places_gathers:
            forwards = self._deferred.forwards_before_gathers(plan.num_microbatches, segments)
        shares = self._deferred.begin_iteration(segments)
        key = id(plan), shares, forwards
        if key not in self._revised and _is_cut(plan.programs[rank]):
            self._revised[key] = plan, plan
        if key not in self._revised:
            stages = range(plan.num_stages)
            revised = gather_later(plan, {stage: forwards[stage // ranks] for stage in stages})
            cut = slice_grad_sync if self._slices else share_grad_sync
            revised = cut(revised, [shares[stage // ranks] for stage in stages])
            verify(revised)
            self._revised[key] = plan, revised  # the plan, so that nothing else gets its id
        return self._revised[key][1]

    def prepare(self, iteration: Iteration) -> None:
        """Begin an iteration; take all due steps if it is an evaluation or carries nothing."""
        late = carried(iteration.program)
        if not (iteration.trains and late):
            self._deferred.drain()
        self._carried = frozenset(stage // iteration.plan.num_ranks for stage in late)
        self._plan_gathers = any(action.op is Op.ALL_GATHER for action in iteration.program)
        super().prepare(iteration)
        if self._carried and iteration.trains:
            self._deferred.prepare(iteration.chunks, iteration.groups, self._sums)

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return the handlers of DP.sync; what comes before a carried STEP is what is left."""
        table = super().handlers(iteration, inner)
        late = carried(iteration.program)
        stepped: set[int] = set()  # stages; what follows is of this iteration

        def reduce(action: Action) -> None:
            if action.stage not in late:
                table[action.op](action)
                return
            chunk = self._chunks[iteration.segment(action)]
            if action.stage in stepped:
                self._deferred.complete(chunk, iteration.unfinished.get(action.stage, ()))
            self._deferred.sums.start_until(chunk, action.end)

        def keep(action: Action) -> None:
            segment = iteration.segment(action)
            self.complete(segment)
            self._deferred.complete(self._chunks[segment])
            self._deferred.sums.keep(self._chunks[segment])

        def finalize(action: Action) -> None:
            self._deferred.sums.finish_kept(self._chunks[iteration.segment(action)])

        def step(action: Action) -> None:
            stepped.add(action.stage)
            table[Op.STEP](action)

        return {
            **table,
            Op.ALL_REDUCE: reduce,
            Op.REDUCE_SCATTER: reduce,
            Op.REDUCE_KEPT: keep,
            Op.FINALIZE: finalize,
            Op.STEP: step,
        }

    def wait(self, segment: int) -> None:
        """Wait for a segment's reduction; a carried segment's is that of the iteration before."""
        if segment not in self._carried:
            super().wait(segment)
            return
        chunk = self._chunks[segment]
        was_due = self._deferred.finish_step(chunk)
        if was_due and not self._plan_gathers:
            self._deferred.gather(chunk)
        self._quiet[segment].close()
        self._hush(segment)  # zeroing the gradients resets DDP's state and re-enables its hooks

    def gather(self, segment: int) -> None:
        """Start to gather a segment's parameters.

        In the first iteration there is nothing to gather: every replica has loaded all parameters.
        """
        if segment not in self._carried:
            super().gather(segment)
        elif self._gathers:
            self._deferred.gather(self._chunks[segment])

    def drain(self, iteration: Iteration) -> None:
        """End the backwards; call ``finalize_model_grads``."""
        if iteration.trains and self._carried:
            self._deferred.finish_backward()
        super().drain(iteration)

    def close(self, error: BaseException | None) -> None:
        """Take the steps that are due."""
        self._deferred.close(error)


def _is_cut(program: Program) -> bool:
    """Return True if carried sums are in slices, or partly in the next iteration, already."""
    late, early = carried(program), stages_in_parts(program)
    return any(
        index < late[stage] or (end is not None and stage not in early)
        for index, (stage, op, end) in enumerate(program)
        if op in SUM_OPS and stage in late
    )
