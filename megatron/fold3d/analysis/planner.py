"""Choose a configuration: which schedule, how many segments, which (dp, pp, tp).

Memory and a lower bound on the iteration come first, from the costs alone; what is left is
simulated in the order of the bounds, until no bound is below what has been found. AIAO and stock
Megatron are searched side by side, so the answer can be that AIAO gains nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import nsmallest

from megatron.fold3d.analysis.candidates import Candidate, candidates
from megatron.fold3d.analysis.choices import Choice, Search
from megatron.fold3d.analysis.cluster import Cluster
from megatron.fold3d.analysis.costs import Costs
from megatron.fold3d.analysis.estimate import Estimate, estimate
from megatron.fold3d.analysis.exposure import exposure, mean
from megatron.fold3d.analysis.memory import memory
from megatron.fold3d.analysis.model import ModelShape
from megatron.fold3d.analysis.simulate import simulate

USABLE_MEMORY = 0.85  # the rest is CUDA's, NCCL's and what the allocator cannot use
_ITERATIONS = 3


@dataclass(frozen=True, slots=True)
class _Bounded:
    candidate: Candidate
    estimate: Estimate
    bound_s: float
    device_bytes: float


def search(
    shape: ModelShape,
    cluster: Cluster,
    *,
    global_batch_size: int,
    top: int = 10,
    progress: Callable[[int, int], None] = lambda done, all_: None,
) -> Search:
    """Return the fastest configurations that fit into memory.

    Args:
        shape: the model.
        cluster: all of its GPUs are used.
        global_batch_size: sequences per iteration.
        top: how many to return.
        progress: called with how many were simulated, and how many there are.

    Raises:
        ValueError: nothing divides evenly, or nothing fits.
    """
    if global_batch_size < 1:
        raise ValueError(f"found global_batch_size={global_batch_size}; it is at least one")
    everything = [
        _bounded(shape, cluster, c) for c in candidates(shape, cluster, global_batch_size)
    ]
    limit = cluster.gpu_memory_bytes * USABLE_MEMORY
    fitting = _quickest_of_each(b for b in everything if b.device_bytes <= limit)
    if not fitting:
        raise ValueError(_nothing_fits(shape, cluster, global_batch_size, everything))
    best, simulated = _simulate_best(fitting, limit, top, progress)
    only_stock = [b for b in fitting if b.candidate.is_stock]
    stock, more = _simulate_best(only_stock, limit, 1, progress)
    if not best:
        raise ValueError(_nothing_fits(shape, cluster, global_batch_size, everything))
    return Search(
        best=best,
        best_stock=stock[0] if stock else None,
        considered=len(everything),
        too_large=sum(b.device_bytes > limit for b in everything),
        simulated=simulated + more,
    )


def _quickest_of_each(bounded: Iterable[_Bounded]) -> list[_Bounded]:
    """Of those that differ in what they recompute alone, keep the one that recomputes least.

    Unless they offload: then less to recompute is more to copy.
    """
    chosen: dict[tuple[object, ...], _Bounded] = {}
    for item in sorted(bounded, key=lambda b: (b.bound_s, b.device_bytes)):
        c = item.candidate
        setup = c.setup if c.offload else replace(c.setup, recompute="none")
        chosen.setdefault((c.schedule, setup, c.num_ranks, c.num_segments, c.offload), item)
    return list(chosen.values())


def _simulate_best(
    bounded: list[_Bounded], limit_bytes: float, top: int, progress: Callable[[int, int], None]
) -> tuple[tuple[Choice, ...], int]:
    """Simulate in the order of the bounds until none can be among the best any more."""
    found: list[Choice] = []
    done = 0
    for item in bounded:
        best = nsmallest(top, (choice.iteration_s for choice in found))
        if len(best) == top and item.bound_s >= best[-1]:
            break
        choice = _simulate(item)
        if choice.device_bytes <= limit_bytes:  # a slow copy stream frees memory late
            found.append(choice)
        done += 1
        progress(done, len(bounded))
    return tuple(sorted(found, key=lambda choice: choice.iteration_s)[:top]), done


def _simulate(item: _Bounded) -> Choice:
    candidate, known = item.candidate, item.estimate
    timeline = simulate(
        candidate.plan(),
        known.costs,
        iterations=1 if candidate.is_stock else _ITERATIONS,
        nic_of_rank=known.nic_of_rank,
        grad_sync_order="fifo" if candidate.is_stock else "edf",
        flush=candidate.is_stock,
    )
    peak = max(rank.device.peak_bytes for rank in memory(timeline, known.footprint))
    return Choice(candidate, timeline.period_s, peak, mean(exposure(timeline)))


def _bounded(shape: ModelShape, cluster: Cluster, candidate: Candidate) -> _Bounded:
    """Bound the iteration from below.

    The fullest rank computes all of its work; the first micro-batch must come to it and the last
    one go back through the other ranks; then the first stage syncs before its next forward.
    """
    ranks = candidate.num_ranks
    known = estimate(
        shape, cluster, candidate.setup, num_ranks=ranks, num_segments=candidate.num_segments
    )
    if candidate.schedule == "1f1b":
        known = replace(known, costs=_blocking(known))
    costs = known.costs
    work = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
    compute_s = max(sum(work[rank::ranks]) for rank in range(ranks)) * candidate.num_microbatches
    bubble_s = sum(work[:ranks]) - max(work[:ranks])
    hops_s = 2 * (ranks - 1) * min(costs.p2p_s, costs.p2p_local_s)
    sync = costs.grad_sync_s
    syncs_s = max(sum(sync[rank::ranks]) for rank in range(ranks))
    bound_s = max(compute_s + bubble_s + hops_s + sync[0], syncs_s)
    if candidate.offload:
        bound_s = max(bound_s, _copies_s(costs, candidate))
    return _Bounded(candidate, known, bound_s, _device_bytes(known, candidate))


def _copies_s(costs: Costs, candidate: Candidate) -> float:
    """What certainly goes through a copy stream: all but the last segment, all but the last few."""
    ranks, segments = candidate.num_ranks, candidate.num_segments
    copied = costs.offload_s[: ranks * (segments - 1)]
    each_s = max((sum(copied[rank::ranks]) for rank in range(ranks)), default=0.0)
    return each_s * max(0, candidate.num_microbatches - 2)


def _blocking(known: Estimate) -> Costs:
    """Let ranks stand still for their messages: stock's 1F1B does not overlap them."""
    costs, several = known.costs, len(set(known.nic_of_rank)) > 1
    message_s = costs.p2p_latency_s + (costs.p2p_s if several else costs.p2p_local_s)
    return replace(
        costs,
        forward_s=tuple(s + message_s for s in costs.forward_s),
        backward_s=tuple(s + message_s for s in costs.backward_s),
        p2p_s=0.0,
        p2p_local_s=0.0,
        p2p_latency_s=0.0,
    )


def _device_bytes(known: Estimate, candidate: Candidate) -> float:
    """The fullest rank, from the number of activations: a close bound without a simulation."""
    footprint, ranks = known.footprint, candidate.num_ranks
    return max(
        static
        + candidate.most_activations(rank) * max(footprint.saved_bytes[rank::ranks])
        + max(footprint.working_bytes[rank::ranks])
        for rank, static in enumerate(footprint.static_bytes)
    )


def _nothing_fits(
    shape: ModelShape, cluster: Cluster, global_batch_size: int, all_: Iterable[_Bounded]
) -> str:
    smallest = min(all_, key=lambda b: b.device_bytes, default=None)
    if smallest is None:
        return (
            f"no split of {shape.name} over {cluster.num_gpus} GPUs divides a batch of "
            f"{global_batch_size}; try a multiple of the number of GPUs"
        )
    need = smallest.device_bytes / USABLE_MEMORY
    return (
        f"{shape.name} does not fit on {cluster.name}: the smallest split needs "
        f"{need / 2**30:.0f} GiB per GPU, found {cluster.gpu_memory_bytes / 2**30:.0f}; "
        f"try {round(need / cluster.gpu_memory_bytes + 0.5) * cluster.num_gpus} GPUs"
    )
