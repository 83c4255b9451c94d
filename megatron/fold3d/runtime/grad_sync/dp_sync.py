"""DP.sync, one segment at a time, through Megatron's DDP and its hooks, or in parts.

A sum that the plan cuts into parts is started part by part. Where weight gradients are computed
parameter by parameter, a part sums what is complete:

    compute    .. 0B0 0B1 │ 0W:250 │ 0W:500 │ 0W:1000 │
    DP.sync               └─ norms ├─ :250 ─┼─ :500 ──┼─── the rest

Keeps one invariant: within an iteration a bucket's gradients are reduced once: by DDP's hooks
inside the segment's last backward, by an explicit start after it, or in parts.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from megatron.fold3d.plan.ir import WHOLE, Action, Op, Plan, carried, hooked
from megatron.fold3d.plan.ops import SUM_OPS
from megatron.fold3d.runtime.feature import Feature, Handler, Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, first_layer_first

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps
    from megatron.fold3d.runtime.grad_sync.other_shards import ReplicatedSegments
    from megatron.fold3d.runtime.grad_sync.second_lane import SecondLane
    from megatron.fold3d.runtime.grad_sync.sums import Sums
    from megatron.fold3d.runtime.trace.recorder import Recorder


class DPSync(Feature):
    """Gradient reduction and parameter all-gather of one rank's model chunks.

    DDP's hooks are disabled from the start of an iteration, as in Megatron's ``no_sync``. Where the
    plan sums a segment right behind its last backward, its hooks are enabled before that backward.
    Of a pair, they are enabled while its own side runs: its gradients come behind the same ones of
    all others. `start_reduction` then starts the reductions that the hooks did not start.

    Args:
        recorder: the recorder of the trace, if there is one.
        side: tells which of the two sides of a pair is running: `Baton.side`.
        due: owns the sums and steps of carried segments, if the run may have any.
        replicated: owns the segments that every replica steps in full, if the run may have any.
        second_lane: has process groups for odd segments, if the streams of a GPU share one queue.
    """

    draining = "the last sums of gradients, behind its program"

    def __init__(
        self,
        recorder: "Recorder | None" = None,
        *,
        side: Callable[[], int] | None = None,
        due: "DueSteps | None" = None,
        replicated: "ReplicatedSegments | None" = None,
        second_lane: "SecondLane | None" = None,
    ) -> None:
        self._recorder = recorder
        self._side = side or (lambda: 0)
        self._due, self._replicated, self._second_lane = due, replicated, second_lane
        self._in_parts: Sums | None = None
        self._sums: dict[Any, Action] = {}  # by chunk, the sum of all of its gradients
        self._chunks: Sequence[Any] = ()
        self._quiet: Sequence[ExitStack] = ()
        self._no_sync: Sequence[Callable[..., Any]] | None = None
        self._gathers = False
        if due is not None:
            self.preparing = "STEP before evaluation"

    def choose_plan(self, plan: Plan, rank: int) -> Plan:
        """Return the plan of a free iteration, or that of one that may be clipped."""
        return plan if self._due is None else self._due.choose_plan(plan, rank)

    def prepare(self, iteration: Iteration) -> None:
        """Disable DDP's hooks until a segment's sum, or until the iteration ends.

        If it is an evaluation or carries nothing, first take all due steps.
        """
        carries = iteration.trains and bool(carried(iteration.program))
        if self._due is not None and not carries:
            self._due.drain()
        config, self._chunks = iteration.config, iteration.chunks
        self._quiet = [iteration.ends.enter_context(ExitStack()) for _ in self._chunks]
        # Megatron sets no_sync_func with --overlap-grad-reduce; without it nothing can start early.
        # It leaves param_sync_func unset where parameters are not sharded or hooks gather them.
        self._no_sync = _per_chunk(config.no_sync_func, self._chunks)
        self._gathers = iteration.trains and config.param_sync_func is not None
        self._sums = {
            self._chunks[iteration.segment(action)]: action.until(WHOLE)
            for action in iteration.program
            if action.op in SUM_OPS
        }
        for segment in range(len(self._chunks)):
            self._hush(segment)
        if self._due is not None and carries:
            self._due.prepare(self._chunks, iteration.groups, self._sums)
        if self._replicated is not None and iteration.trains:
            self._replicated.prepare(self._chunks)
        if self._second_lane is not None and iteration.trains:
            self._second_lane.prepare(iteration)

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return the handlers of DP.sync; `BACKWARD` enables hooks that may start a sum."""
        program, due = iteration.program, self._due
        late = carried(program)
        cut = {a.stage for a in program if a.op in SUM_OPS and a.microbatch is not None}
        in_parts = cut if self._no_sync is not None else set()
        last = {a.stage: a for a in program if a.op is Op.BACKWARD}
        by_hooks = hooked(program)
        switched = self._second_lane.stages(iteration) if self._second_lane is not None else ()
        plan_gathers = any(action.op is Op.ALL_GATHER for action in program)
        stepped: set[int] = set()  # carried stages; what follows is of this iteration

        def backward(action: Action) -> None:
            groups: Sequence[Any] = ()
            if action == last[action.stage]:
                segment = iteration.segment(action)
                if self._second_lane is not None and action.stage in switched:
                    self._second_lane.enter(iteration, self._chunks[segment])
                if action.stage in by_hooks:
                    self._quiet[segment].close()
                    groups = [*bucket_groups(self._chunks[segment])]
            for bucket_group in groups:
                bucket_group.is_last_microbatch = _IsOn(self._side)
            inner[Op.BACKWARD](action)
            for bucket_group in groups:
                bucket_group.is_last_microbatch = True

        def reduce(action: Action) -> None:
            segment = iteration.segment(action)
            chunk, unfinished = self._chunks[segment], iteration.unfinished.get(action.stage, ())
            if due is not None and action.stage in late:
                if action.stage in stepped:
                    due.complete(chunk, unfinished)
                due.sums.start_until(chunk, action.end)
                return
            if action.stage in in_parts:
                self._sums_in_parts().complete(chunk, unfinished)
                self._sums_in_parts().start_until(chunk, action.end)
            if action.end == WHOLE:
                self.complete(segment)
                self.start_reduction(segment)

        def step(action: Action) -> None:
            segment = iteration.segment(action)
            if due is None or action.stage not in late:
                self.wait(segment)
                return
            stepped.add(action.stage)
            chunk = self._chunks[segment]
            if due.finish_step(chunk) and not plan_gathers:
                due.gather(chunk)
            self._quiet[segment].close()
            self._hush(segment)  # zeroing the gradients resets DDP's state and re-enables its hooks

        def gather(action: Action) -> None:
            chunk = self._chunks[iteration.segment(action)]
            if not self._gathers:
                return
            if due is not None and action.stage in late:
                due.gather(chunk)
                return
            for bucket_group in first_layer_first(chunk):
                if not bucket_group.param_gather_dispatched:
                    bucket_group.start_param_sync()

        def free(action: Action) -> None:
            if action.stage not in late:
                self.wait(iteration.segment(action))
            inner[Op.FREE_GRAD](action)

        handlers: dict[Op, Handler] = {
            Op.BACKWARD: backward,
            Op.ALL_REDUCE: reduce,
            Op.REDUCE_SCATTER: reduce,
            Op.STEP: step,
            Op.FREE_GRAD: free,
            # In the forward, DDP's hook of each layer waits for the layer's own buckets, and
            # starts their all-gather if that has not been started.
            Op.ALL_GATHER: gather,
        }
        if due is not None:

            def keep(action: Action) -> None:
                segment = iteration.segment(action)
                self.complete(segment)
                due.complete(self._chunks[segment])
                due.sums.keep(self._chunks[segment])

            def finalize(action: Action) -> None:
                due.sums.finish_kept(self._chunks[iteration.segment(action)])

            handlers |= {Op.REDUCE_KEPT: keep, Op.FINALIZE: finalize}
        return handlers

    def drain(self, iteration: Iteration) -> None:
        """Call Megatron's ``finalize_model_grads`` at the end of a training iteration."""
        if self._due is not None and iteration.trains:
            self._due.finish_backward()
        config = iteration.config
        if config.finalize_model_grads_func is not None and iteration.trains:
            config.finalize_model_grads_func(
                iteration.chunks,
                iteration.num_tokens if config.calculate_per_token_loss else None,
                pg_collection=iteration.groups,
                force_all_reduce=iteration.force_all_reduce,
            )

    def close(self, error: BaseException | None) -> None:
        """Take the steps that are due."""
        if self._due is not None:
            self._due.close(error)

    def complete(self, segment: int) -> None:
        """Note that a segment's gradients are complete; DDP's hooks may run again."""
        self._quiet[segment].close()
        if self._no_sync is not None:
            for bucket_group in bucket_groups(self._chunks[segment]):
                _forget_partial_counts(bucket_group)

    def start_reduction(self, segment: int) -> None:
        """Start the bucket groups that hooks did not start; in iteration 1 hooks only count."""
        chunk = self._chunks[segment]
        if self._no_sync is not None:
            for bucket_group in bucket_groups(chunk):
                if not (
                    bucket_group.grad_reduce_finished  # in parts
                    or _reduced_by_hooks(bucket_group)
                    or _reduced_when_finished(bucket_group)
                ):
                    bucket_group.start_grad_sync(force_all_reduce=chunk.force_all_reduce)

    def wait(self, segment: int) -> None:
        """Wait for the segment's reduction; ``finalize_model_grads`` then skips it."""
        chunk = self._chunks[segment]
        if self._in_parts is not None:
            self._in_parts.wait(chunk)
        if self._no_sync is not None:
            chunk.finish_grad_sync(force_all_reduce=chunk.force_all_reduce)

    def _sums_in_parts(self) -> "Sums":
        if self._in_parts is None:
            from megatron.fold3d.runtime.grad_sync.sums import Sums

            self._in_parts = Sums(self._observe, self._chunks)
        return self._in_parts

    def _observe(self, chunk: Any, until: int, _: int) -> list[Callable[[], None]]:
        if self._recorder is None or not self._recorder.is_on:
            return []
        return [self._recorder.open_span(self._sums[chunk].until(until), "grad_sync")]

    def _hush(self, segment: int) -> None:
        if self._no_sync is not None:
            self._quiet[segment].enter_context(self._no_sync[segment]())


class _IsOn:
    """What DDP's hooks ask before they count a gradient: true on the side that has made it."""

    def __init__(self, side: Callable[[], int]) -> None:
        self._side, self._own = side, side()

    def __bool__(self) -> bool:
        return self._side() == self._own


def _reduced_by_hooks(bucket_group: Any) -> bool:
    """True if DDP's hooks have started the reduction: every parameter's hook ran its full count.

    DDP learns these counts in the first iteration, in which hooks start nothing.
    """
    return bool(
        not bucket_group.is_first_batch
        and bucket_group.per_param_grad_ready_counts
        == bucket_group.golden_per_param_grad_ready_counts
    )


def _reduced_when_finished(bucket_group: Any) -> bool:
    """True if ``finish_grad_sync`` starts the reduction itself, even if it is already in flight.

    It does so in the first batch unless the bucket group holds a reduction handle. With several
    distributed optimizer instances DDP waits for a stream and keeps no handles.
    """
    return bool(
        bucket_group.is_first_batch
        and bucket_group.ddp_config.num_distributed_optimizer_instances > 1
    )


def _forget_partial_counts(bucket_group: Any) -> None:
    """Keep DDP in its counting phase if a parameter gets no gradient, so its hook never runs.

    From the second iteration on, DDP would wait for that hook. This happens with multi-token
    prediction and tied embeddings, which leave the last stage's output layer unused.
    """
    counts = bucket_group.per_param_grad_ready_counts
    if bucket_group.is_first_batch and len(counts) < len(bucket_group.params):
        counts.clear()


def _per_chunk(
    function: Any, chunks: Sequence[torch.nn.Module]
) -> Sequence[Callable[..., Any]] | None:
    """Return one function per chunk, or None; Megatron keeps a bare one for a single chunk."""
    if function is None or isinstance(function, list):
        return function
    return [function] * len(chunks)
