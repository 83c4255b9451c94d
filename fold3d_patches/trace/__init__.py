"""The patches of ``--trace``: upstream functions that also record when they begin and end."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fold3d_patches.registry import Patch

if TYPE_CHECKING:
    from megatron.fold3d.config.fold3d_config import Fold3DConfig
    from megatron.fold3d.runtime.trace.tracer import Tracer


def patches(tracer: "Tracer", config: "Fold3DConfig") -> Iterator[Patch]:
    """Yield what a trace of a run needs beside the features that tell its recorder."""
    from fold3d_patches.trace import collectives, spans

    yield from spans.iteration(tracer)
    yield from collectives.patches(tracer)
    yield from spans.updates(tracer)
    if config.choice.order == "stock":  # our executor records its own computations
        yield from spans.computations(tracer)
    if config.records_tp_sync and not config.choice.pairs:  # pairs have it
        from fold3d_patches.schedule import tensor_parallel_group

        yield tensor_parallel_group.patch(recorder=tracer.recorder)
