"""Patch ``megatron.core.tensor_parallel.random.checkpoint``.

Why: what recomputation starts from stays on the device until its backward, and nothing says which
    of all saved tensors it is; and recomputation itself waits for that backward.
Change: while it is saved, the offloader looks on (paper Sec. IV, offloader); what a plan recomputes
    early is noted.
Remove when: Megatron offloads the inputs of recomputation, and recomputes ahead of a backward,
    under any pipeline schedule.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.early_recompute import EarlyRecompute
    from megatron.fold3d.runtime.offload.offloader import Offloader


def patch(offloader: "Offloader | None" = None, early: "EarlyRecompute | None" = None) -> Patch:
    """Return the patch of the function that full and selective recomputation call."""

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(
            function: Callable[..., Any], distribute_saved_activations: bool, *args: Any
        ) -> Any:
            with nullcontext() if offloader is None else offloader.checkpoint():
                if early is not None:
                    return early.checkpoint(upstream, function, distribute_saved_activations, *args)
                return upstream(function, distribute_saved_activations, *args)

        return checkpoint

    return Patch(
        target="megatron.core.tensor_parallel.random:checkpoint",
        rebinds=("megatron.core.tensor_parallel:checkpoint",),
        parameters=("function", "distribute_saved_activations", "args"),
        make=make,
    )
