"""Patch ``megatron.core.optimizer.optimizer.ChainedOptimizer.step``.

Why: ``train_step`` steps all parameters at the end of an iteration, with the distributed optimizer
    each replica its own shards, and calls no hook behind it.
Change: what a run has of the following is put around Megatron's step.
    `due_steps`: a model chunk whose DP.sync reaches into the next iteration is stepped before its
    next forward, with the learning rate and weight decay of this one (paper Algorithm 2). The norm
    of the gradients is not known yet. Once known, it is logged and written to TensorBoard and W&B
    with its iteration, as in Megatron. A step that may have to be clipped or skipped stays
    Megatron's own.
    `replicated`: each replica steps all shards of some segments, so that they need no all-gather.
    `noted`: ``--schedule auto`` compares the times of iterations that end with a step. So it learns
    when each step ends, and whether it was taken: Megatron may skip it, or run an iteration again.
Remove when: Megatron's optimizer steps model chunks one by one, lets each chunk choose whether its
    optimizer is sharded, and calls a hook behind a step.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.auto_schedule import AutoSchedule
    from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps
    from megatron.fold3d.runtime.grad_sync.other_shards import ReplicatedSegments
    from megatron.fold3d.runtime.trace.metrics import Metrics

Step = Callable[[Any], Any]
Around = Callable[[Step], Step]


def patch(*around: Around) -> Patch:
    """Return the patch of the optimizer step at the end of an iteration, the innermost first."""

    def make(upstream: Step) -> Step:
        step = upstream
        for wrap in around:
            step = wrap(step)
        return step

    return Patch(
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.step",
        parameters=("self",),
        make=make,
    )


def due_steps(due: "DueSteps", metrics: "Metrics") -> Around:
    """Let ``due`` step what is reduced in the iteration, and the rest in the next one."""

    def make(upstream: Step) -> Step:
        from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
        from megatron.training import get_args

        def step(self: Any) -> Any:
            args = get_args()
            iteration = args.curr_iteration + 1
            num_samples = args.consumed_train_samples + get_current_running_global_batch_size()
            report = partial(metrics.write_grad_norm, iteration=iteration, num_samples=num_samples)
            return due.step(
                self,
                iteration,
                whole_step=lambda: upstream(self),
                report=report if iteration % args.tensorboard_log_interval == 0 else None,
                logs=iteration % args.log_interval == 0,
            )

        return step

    return make


def replicated(segments: "ReplicatedSegments") -> Around:
    """Let every replica step all shards of these segments."""

    def make(upstream: Step) -> Step:
        def step(self: Any) -> Any:
            with segments.widened(self):
                return upstream(self)

        return step

    return make


def noted(auto: "AutoSchedule") -> Around:
    """Let ``auto`` note each step."""

    def make(upstream: Step) -> Step:
        def step(self: Any) -> Any:
            outcome = upstream(self)
            auto.note_step(taken=bool(outcome[0]))
            return outcome

        return step

    return make
