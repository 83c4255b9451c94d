"""Patch ``megatron.core.optimizer.optimizer.ChainedOptimizer.step``.

Why: ``train_step`` steps all parameters at the end of an iteration; a model chunk whose gradients
    are still being reduced can only be stepped later.
Change: chunks whose DP.sync reaches into the next iteration are stepped before their next forward,
    with the learning rate and weight decay of this one (paper Algorithm 2). The norm of the
    gradients is not known yet. Once known, it is logged and written to TensorBoard and W&B with its
    iteration, as in Megatron. A step that may have to be clipped or skipped stays Megatron's own.
Remove when: Megatron's optimizer steps model chunks one by one.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps
    from megatron.fold3d.runtime.trace.metrics import Metrics


def patch(due: "DueSteps", metrics: "Metrics") -> Patch:
    """Return the patch of the optimizer step at the end of an iteration."""

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
        from megatron.training import get_args

        def step(self: Any) -> Any:
            args = get_args()
            iteration = args.curr_iteration + 1
            num_samples = args.consumed_train_samples + get_current_running_global_batch_size()
            writes = iteration % args.tensorboard_log_interval == 0
            return due.step(
                self,
                iteration,
                whole_step=lambda: upstream(self),
                report=partial(
                    metrics.write_grad_norm, iteration=iteration, num_samples=num_samples
                )
                if writes
                else None,
                logs=iteration % args.log_interval == 0,
            )

        return step

    return Patch(
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.step",
        parameters=("self",),
        make=make,
    )
