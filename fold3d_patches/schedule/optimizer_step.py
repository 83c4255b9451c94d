"""Patch ``megatron.core.optimizer.optimizer.ChainedOptimizer.step``.

Why: ``train_step`` steps all parameters at the end of an iteration, with the distributed optimizer
    each replica its own shards, and calls no hook behind it.
Change: with ``step=next``, a model chunk whose DP.sync reaches into the next iteration is stepped
    before its next forward, with the learning rate and weight decay of this one (paper Algorithm
    2). The norm of the gradients is not known yet. Once known, it is logged and written to
    TensorBoard and W&B with its iteration, as in Megatron. A step that may have to be clipped or
    skipped stays Megatron's own.
    With ``optimizer=replicated``, each replica steps all shards of some segments, so that they need
    no all-gather.
    With ``--schedule auto``, which compares the times of iterations that end with a step, begin
    and end of each are noted, and whether it was taken: Megatron may skip it, or run an iteration
    again.
Remove when: Megatron's optimizer steps model chunks one by one, lets each chunk choose whether its
    optimizer is sharded, and calls a hook behind a step.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch, around

if TYPE_CHECKING:
    from megatron.fold3d.runtime.auto_schedule import AutoSchedule
    from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps
    from megatron.fold3d.runtime.grad_sync.other_shards import ReplicatedSegments
    from megatron.fold3d.runtime.trace.metrics import Metrics


def patch(
    due: "DueSteps | None",
    metrics: "Metrics",
    replicated: "ReplicatedSegments | None",
    auto: "AutoSchedule | None",
) -> Patch:
    """Return the patch of the optimizer step at the end of an iteration.

    Args:
        due: steps model chunks in two iterations, if the run has any.
        metrics: gets the gradient norms of these steps.
        replicated: the segments that every replica steps in full, if the run has any.
        auto: learns of each step, if the run measures.
    """

    @around("megatron.core.optimizer.optimizer:ChainedOptimizer.step", parameters="self /")
    def step(upstream: Callable[[Any], Any], optimizer: Any) -> Any:
        whole_step = partial(upstream, optimizer)

        def take() -> Any:
            with nullcontext() if replicated is None else replicated.widened(optimizer):
                if due is None:
                    return whole_step()
                return _in_two_iterations(due, optimizer, whole_step, metrics)

        return take() if auto is None else auto.step(take)

    return step


def _in_two_iterations(
    due: "DueSteps", optimizer: Any, whole_step: Callable[[], Any], metrics: "Metrics"
) -> Any:
    from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
    from megatron.training import get_args

    args = get_args()
    iteration = args.curr_iteration + 1
    num_samples = args.consumed_train_samples + get_current_running_global_batch_size()
    report = partial(metrics.write_grad_norm, iteration=iteration, num_samples=num_samples)
    return due.step(
        optimizer,
        iteration,
        whole_step=whole_step,
        report=report if iteration % args.tensorboard_log_interval == 0 else None,
        logs=iteration % args.log_interval == 0,
    )
