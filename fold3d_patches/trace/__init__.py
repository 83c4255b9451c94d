"""The patches of ``--trace``: upstream functions that also record when they begin and end."""

from typing import TYPE_CHECKING

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.runtime.trace.tracer import Tracer


def patches(tracer: "Tracer", schedule: str) -> tuple[Patch, ...]:
    """Return the patches for a schedule; our executor itself records what it computes."""
    from fold3d_patches.trace import collectives, spans

    return (
        spans.iteration(tracer),
        *collectives.patches(tracer),
        *spans.updates(tracer),
        *(spans.computations(tracer) if schedule == "stock" else ()),
    )
