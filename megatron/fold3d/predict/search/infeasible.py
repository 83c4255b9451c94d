"""Explanations why a search has found nothing, with the nearest sizes that would work."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from megatron.fold3d.predict.cost_model.cluster import USABLE_MEMORY, Cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.search.best_first import BestFirst
from megatron.fold3d.predict.search.bounds import Bounded
from megatron.fold3d.predict.search.candidates import Candidate, candidates

_MOST_GPUS = 1 << 16
_FLAGS: dict[str, tuple[str, Callable[[Candidate], int]]] = {
    "tensor_parallel": ("--tp", lambda c: c.setup.tensor_parallel),
    "num_ranks": ("--pp", lambda c: c.num_ranks),
    "data_parallel": ("--dp", lambda c: c.setup.data_parallel),
    "num_segments": ("--segments", lambda c: c.num_segments),
    "microbatch_size": ("--micro-batch-size", lambda c: c.setup.microbatch_size),
}
"""The sizes that can be fixed: the name in `fold3d search`, and the place in a candidate."""


def no_split_message(
    shape: ModelShape, cluster: Cluster, global_batch_size: int, given: Mapping[str, Any]
) -> str:
    """Return a message with the given sizes that cannot divide the job, and values that can."""
    sizes = {name: value for name, value in given.items() if name in _FLAGS}
    job = f"{shape.name} on {cluster.num_gpus} GPUs with a batch of {global_batch_size}"
    for name, value in sizes.items():
        flag, of = _FLAGS[name]
        freed = {other: given[other] for other in given if other != name}
        others = candidates(shape, cluster, global_batch_size, freed)
        if fit := sorted(set(map(of, others))):
            return (
                f"found {flag} {value}, which no split of {job} has; beside the other sizes given "
                f"it can be {', '.join(map(str, fit))}"
            )
    found = f"no split of {job} has {_spelled(sizes)}" if sizes else f"no split of {job}"
    fix = "give fewer sizes, or " if sizes else ""
    return f"{found}; {fix}try a batch that is a multiple of the number of GPUs"


def no_fit_message(
    shape: ModelShape,
    cluster: Cluster,
    global_batch_size: int,
    given: Mapping[str, Any],
    *,
    found: Iterable[Bounded],
) -> str:
    """Return a message with the missing memory, and with sizes with which the model fits.

    Args:
        found: candidates that are too large for memory.
    """
    need = min(b.device_bytes for b in found) / USABLE_MEMORY
    message = (
        f"{shape.name} does not fit on {cluster.name}: the smallest split needs "
        f"{need / 2**30:.0f} GiB per GPU, found {cluster.gpu_memory_bytes / 2**30:.0f}"
    )
    least = {
        "microbatch_size": 1,
        "recompute": "full",
        "context_parallel": 1,
        "expert_parallel": 1,
        "fp32": given.get("fp32", False),
    }
    more = cluster
    while more.num_gpus <= _MOST_GPUS:
        fit = min(
            map(BestFirst(shape, more).bounded, candidates(shape, more, global_batch_size, least)),
            key=lambda b: b.device_bytes,
            default=None,
        )
        if fit and fit.device_bytes <= more.usable_bytes:
            sizes = {name: of(fit.candidate) for name, (_, of) in _FLAGS.items()}
            where = "" if more is cluster else f" on {more.num_gpus} GPUs"
            return f"{message}; try {_spelled(sizes)} --recompute full{where}"
        more = replace(more, num_nodes=2 * more.num_nodes)
    return f"{message}, and so it does not on {more.num_gpus // 2}; take GPUs with more memory"


def _spelled(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{_FLAGS[name][0]} {value}" for name, value in sizes.items())
