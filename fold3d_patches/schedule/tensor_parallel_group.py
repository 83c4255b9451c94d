"""Patch ``megatron.core.parallel_state.initialize_model_parallel``.

Why: layers wait for their collectives at once, so nothing overlaps them, and no trace has their
    times.
Change: the groups of tensor parallelism and of experts are wrapped before any module stores them.
    With pairs, the other micro-batch runs while a layer waits. A trace gets each collective.
Remove when: Megatron runs two micro-batches at a time under any pipeline schedule.
"""

from collections.abc import Callable
from typing import Any

from fold3d_patches.registry import Patch, around
from megatron.fold3d.runtime.events import UNHEARD, Events
from megatron.fold3d.runtime.tensor_parallel.baton import Baton
from megatron.fold3d.runtime.tensor_parallel.paired_group import PairedGroup


def patch(baton: Baton | None = None, recorder: Events = UNHEARD) -> Patch:
    """Return the patch that lets the tensor-parallel group hand ``baton`` over."""
    hand_over = (lambda: None) if baton is None else baton.hand_over

    @around("megatron.core.parallel_state:initialize_model_parallel")
    def initialize(upstream: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        from megatron.core import parallel_state

        upstream(*args, **kwargs)
        for kind, traced in (("TENSOR", "TP.sync"), ("EXPERT", "EP.sync")):
            name = f"_{kind}_MODEL_PARALLEL_GROUP"
            group = getattr(parallel_state, name)
            if group.size() > 1:  # of one rank, Transformer Engine gets torch's own
                setattr(parallel_state, name, PairedGroup(group, hand_over, recorder, traced))

    return initialize
