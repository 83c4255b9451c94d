"""Patch ``megatron.core.tensor_parallel.random.checkpoint``.

Why: the inputs of recomputation stay on the device until their backward, and nothing identifies
    them among all saved tensors. And recomputation itself waits for that backward.
Change: the offloader collects the tensors saved inside ``checkpoint`` (paper Sec. IV, offloader).
    Functions that the plan recomputes early are recorded.
Remove when: Megatron offloads the inputs of recomputation, and recomputes ahead of a backward,
    under any pipeline schedule.
"""

from typing import TYPE_CHECKING

from fold3d_patches.registry import Patch, around

if TYPE_CHECKING:
    from megatron.fold3d.runtime.early_recompute import EarlyRecompute
    from megatron.fold3d.runtime.offload.offloader import Offloader


def patch(units: "Offloader | EarlyRecompute") -> Patch:
    """Return the patch of the function that full and selective recomputation call."""
    return around(
        "megatron.core.tensor_parallel.random:checkpoint",
        rebinds=("megatron.core.tensor_parallel:checkpoint",),
        parameters="function distribute_saved_activations /",
    )(units.checkpoint)
