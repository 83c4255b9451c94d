"""DP.sync, one segment at a time, through Megatron's DDP and its hooks, or in parts.

A sum that the plan cuts into parts is started part by part. Where weight gradients are computed
parameter by parameter, a part sums what is complete:

    compute    .. 0B0 0B1 │ 0W:250 │ 0W:500 │ 0W:1000 │
    DP.sync               └─ norms ├─ :250 ─┼─ :500 ──┼─── the rest

Keeps one invariant: within an iteration a bucket's gradients are reduced once: by DDP's hooks
inside the segment's last backward, by an explicit start after it, or in parts.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron.fold3d.plan.ir import WHOLE, Action, Op, carried, hooked
from megatron.fold3d.plan.ops import SUM_OPS
from megatron.fold3d.runtime.events import UNHEARD, Events
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, is_sharded, start_gathers

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.stage_gradients import StageGradients


class DPSync(Feature):
    """Gradient reduction and parameter all-gather of one rank's model chunks.

    The plan's op says which collective sums a stage: with the distributed optimizer, `ALL_REDUCE`
    gives every replica whole gradients. DDP's hooks and Megatron's finalization read that from
    ``force_all_reduce`` of the chunk, which is set here and nowhere else.

    DDP's hooks are disabled from the start of an iteration, as in Megatron's ``no_sync``. If the
    plan sums a segment right after its last backward, the segment's hooks are enabled before that
    backward. If this backward is one of a pair, the hooks are enabled only while its side runs. The
    pair's other micro-batch is ahead of it in every layer, so each gradient is complete when a hook
    sees it. `start_reduction` then starts the reductions that the hooks did not start.

    Args:
        side: returns which side of a pair is running: `Baton.side`.
    """

    draining = "the last sums of gradients, behind its program"

    def __init__(self, recorder: Events = UNHEARD, side: Callable[[], int] | None = None) -> None:
        self._recorder = recorder
        self._side = side or (lambda: 0)
        self._in_parts: dict[int, StageGradients] = {}  # by segment whose sum was cut
        self._chunks: Sequence[Any] = ()
        self._overlaps = False

    def prepare(self, iteration: Iteration) -> None:
        """Disable DDP's hooks until a segment's sum, or until the iteration ends."""
        self._chunks = iteration.chunks
        # Megatron sets no_sync_func with --overlap-grad-reduce; without it nothing can start early.
        self._overlaps = iteration.config.no_sync_func is not None
        for segment in range(len(self._chunks)):
            self._enable_hooks(segment, False)
            iteration.ends.callback(self._enable_hooks, segment, True)
        for action in iteration.program:
            chunk: Any = self._chunks[iteration.segment(action)]
            if action.op is Op.ALL_REDUCE and any(map(is_sharded, bucket_groups(chunk))):
                chunk.force_all_reduce = True  # until Megatron resets it after the iteration

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return the handlers of DP.sync; `BACKWARD` enables hooks that may start a sum.

        `DueSteps` sums, steps and gathers what is carried.
        """
        program, late = iteration.program, carried(iteration.program)
        cut = {a.stage for a in program if a.op in SUM_OPS and a.microbatch is not None}
        in_parts = cut - late.keys() if self._overlaps else set()
        last = {a.stage: a for a in program if a.op is Op.BACKWARD}
        by_hooks = hooked(program)

        def backward(action: Action) -> None:
            is_hooked = action == last[action.stage] and action.stage in by_hooks
            if is_hooked:
                self._enable_hooks(iteration.segment(action), _IsOn(self._side))
            inner[Op.BACKWARD](action)
            if is_hooked:
                self._enable_hooks(iteration.segment(action), True)

        def reduce(action: Action) -> None:
            segment = iteration.segment(action)
            if action.stage in in_parts:
                gradients = self._gradients_in_parts(segment, action.stage)
                gradients.complete(iteration.unfinished.get(action.stage, ()))
                gradients.start_until(action.end)
            if action.end == WHOLE:
                self.complete(segment)
                self.start_reduction(segment)

        def step(action: Action) -> None:
            if action.stage not in late:
                self.wait(iteration.segment(action))
            else:  # zeroing the gradients has reset DDP's state and enabled its hooks
                self._enable_hooks(iteration.segment(action), False)

        def gather(action: Action) -> None:
            # Megatron leaves it unset where parameters are not sharded or hooks gather them.
            if iteration.hooks_wait:
                start_gathers(self._chunks[iteration.segment(action)])

        def free(action: Action) -> None:
            if action.stage not in late:
                self.wait(iteration.segment(action))
            inner[Op.FREE_GRAD](action)

        return {
            Op.BACKWARD: backward,
            **dict.fromkeys(SUM_OPS, reduce),
            Op.REDUCE_KEPT: lambda action: self.complete(iteration.segment(action)),
            Op.STEP: step,
            Op.FREE_GRAD: free,
            # In the forward, DDP's hook of each layer waits for the layer's own buckets, and
            # starts their all-gather if that has not been started.
            Op.ALL_GATHER: gather,
        }

    def drain(self, iteration: Iteration) -> None:
        """Call Megatron's ``finalize_model_grads`` at the end of a training iteration."""
        config = iteration.config
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func(
                iteration.chunks,
                iteration.num_tokens if config.calculate_per_token_loss else None,
                pg_collection=iteration.groups,
                force_all_reduce=iteration.force_all_reduce,
            )

    def complete(self, segment: int) -> None:
        """Note that a segment's gradients are complete; DDP's hooks may run again."""
        self._enable_hooks(segment, True)
        for bucket_group in bucket_groups(self._chunks[segment]):
            _forget_partial_counts(bucket_group)

    def start_reduction(self, segment: int) -> None:
        """Start the bucket groups that hooks did not start; in iteration 1 hooks only count."""
        chunk = self._chunks[segment]
        if self._overlaps:
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
        if segment in self._in_parts:
            self._in_parts[segment].wait()
        if self._overlaps:
            chunk.finish_grad_sync(force_all_reduce=chunk.force_all_reduce)

    def _gradients_in_parts(self, segment: int, stage: int) -> "StageGradients":
        if segment not in self._in_parts:
            from megatron.fold3d.runtime.grad_sync.stage_gradients import StageGradients

            of_segment = StageGradients(self._chunks[segment], stage, self._recorder)
            self._in_parts[segment] = of_segment
        return self._in_parts[segment]

    def _enable_hooks(self, segment: int, are_on: "bool | _IsOn") -> None:
        for bucket_group in bucket_groups(self._chunks[segment]):
            bucket_group.is_last_microbatch = are_on


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
