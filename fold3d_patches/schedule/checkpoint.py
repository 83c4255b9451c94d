"""Patch ``megatron.core.tensor_parallel.random.checkpoint``.

Why: what recomputation starts from stays on the device until its backward, and nothing says which
    of all saved tensors it is.
Change: while it is saved, the offloader looks on (paper Sec. IV, offloader).
Remove when: Megatron offloads the inputs of recomputation under any pipeline schedule.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.offload.offloader import Offloader


def patch(offloader: "Offloader") -> Patch:
    """What full and selective recomputation run a part of the model through."""

    def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(
            function: Callable[..., Any], distribute_saved_activations: bool, *args: Any
        ) -> Any:
            with offloader.checkpoint():
                return upstream(function, distribute_saved_activations, *args)

        return checkpoint

    return Patch(
        target="megatron.core.tensor_parallel.random:checkpoint",
        rebinds=("megatron.core.tensor_parallel:checkpoint",),
        parameters=("function", "distribute_saved_activations", "args"),
        make=make,
    )
