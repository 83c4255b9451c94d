"""Patch ``megatron.training.training.train_step``.

Why: only the training loop knows where an iteration begins and ends, and its number.
Change: a trace begins and ends with it.
Remove when: Megatron calls hooks around an iteration.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.trace.tracer import Tracer


def patch(tracer: "Tracer") -> Patch:
    """Return the patch of an iteration, from zeroing the gradients to the optimizer step."""

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(
            forward_step_func: Any,
            data_iterator: Any,
            model: Any,
            *args: Any,
            iteration: int,
            **kwargs: Any,
        ) -> Any:
            with tracer.iteration(iteration + 1, model):  # as the log counts
                return upstream(
                    forward_step_func, data_iterator, model, *args, iteration=iteration, **kwargs
                )

        return train_step

    return Patch(
        target="megatron.training.training:train_step",
        parameters=(
            *("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler"),
            *("config", "forward_backward_func", "iteration", "pg_collection", "p2p_communicator"),
        ),
        make=make,
    )
