"""The planner's search: candidates are simulated in the order of lower bounds on their time.

Most candidates are never simulated, since their bound is above the time of a known candidate.
"""

import os
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from heapq import heappop, heappush
from math import inf
from multiprocessing import get_context

from megatron.fold3d.observe.exposure import Exposure
from megatron.fold3d.observe.memory_curve import memory
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.estimate import Estimate, estimate
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.placement import routes
from megatron.fold3d.predict.search.bounds import (
    Bounded,
    bounded,
    exact_bytes,
    first_sync_s,
    has_exact_bytes,
)
from megatron.fold3d.predict.search.candidate_timeline import (
    timeline_of,
    undisturbed,
    without_grad_sync,
)
from megatron.fold3d.predict.search.candidates import Candidate, estimate_of
from megatron.fold3d.predict.search.many_microbatches import (
    can_extrapolate,
    extrapolated,
    iteration_s,
    measures,
)
from megatron.fold3d.predict.search.search_result import JudgedCandidate

MOST_FORWARDS = 60_000
"""Neighbours, and runs with many queues, are simulated in full up to this many forwards."""
MANY_GPUS = 1024
"""From this size on, simulations run in other processes: they take longer than the hand-over."""
_AT_ONCE = 2  # simulations
LISTED = 1.2
"""A candidate that takes this many times as long as the fastest one is not listed."""


def processes(cluster: Cluster) -> AbstractContextManager[Executor | None]:
    """Return a pool of processes, or None for a cluster too small to gain from one."""
    if cluster.num_gpus < MANY_GPUS or len(os.sched_getaffinity(0)) == 1:
        return nullcontext()
    return ProcessPoolExecutor(_AT_ONCE, get_context("forkserver"))


class BestFirst:
    """Bounds and simulates candidates of one model on one cluster, each candidate once.

    Args:
        progress: called with the numbers of simulated candidates, and of all that may follow.
        pool: processes that simulate; None simulates in this process.

    Attributes:
        judged: all candidates that were simulated.
    """

    def __init__(
        self,
        shape: ModelShape,
        cluster: Cluster,
        progress: Callable[[int, int], None] = lambda done, all_: None,
        pool: Executor | None = None,
    ) -> None:
        self._pool, self._at_once = pool, _AT_ONCE if pool else 1
        self.limit_bytes = cluster.usable_bytes
        self.host_limit_bytes = cluster.usable_host_bytes
        self.shape, self._cluster = shape, cluster
        self._of_sizes = cache(estimate)
        self._progress = progress
        self.judged: dict[Candidate, JudgedCandidate] = {}
        self._undisturbed_s: dict[Candidate, float] = {}

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the costs and sizes of a candidate; equal sizes are estimated once."""
        return estimate_of(self.shape, self._cluster, candidate, self._of_sizes)

    def can_place(self, candidate: Candidate) -> bool:
        """Return True if all nodes of a pipeline rank have equal paths through the switches."""
        try:
            routes(self._cluster, candidate.setup, candidate.num_ranks)
        except ValueError:
            return False
        return True

    def differ_only_in_rank_order(self, candidate: Candidate, other: Candidate) -> bool:
        """Return True if candidates differ in the order of ranks, and have equal estimates."""
        orders = candidate.setup.order, other.setup.order
        return orders[0] != orders[1] and self.estimate(candidate) == self.estimate(other)

    def is_affordable(self, candidate: Candidate) -> bool:
        """Return False if the iteration is too long to simulate, and cannot be extrapolated."""
        c = candidate
        forwards = c.num_ranks * c.num_segments * c.num_microbatches
        return forwards <= MOST_FORWARDS or can_extrapolate(c, self.estimate(c))

    def bounded(self, candidate: Candidate) -> Bounded:
        """Return a candidate's bounds, computed without a simulation."""
        return bounded(candidate, self.estimate(candidate), self.limit_bytes)

    def fits(self, known: Bounded | JudgedCandidate) -> bool:
        """Return True if the GPU's memory and its share of the host's memory are enough."""
        host_fits = known.host_bytes <= self.host_limit_bytes
        return known.device_bytes <= self.limit_bytes and host_fits

    def at_least_s(self, item: Bounded) -> float:
        """Return a tighter lower bound than ``bound_s``, from a simulation without DP.sync."""
        if item.candidate.choice.fills_gaps:  # only its simulation finds its order
            return item.bound_s
        alone = without_grad_sync(item.candidate)
        if alone not in self._undisturbed_s:
            simulated = partial(undisturbed, estimate=item.estimate)
            self._undisturbed_s[alone] = iteration_s(alone, item.estimate, simulated)
        return self._undisturbed_s[alone] + first_sync_s(item.candidate, item.estimate)

    def best(
        self, among: Iterable[Bounded], top: int, limit_s: float = inf
    ) -> tuple[JudgedCandidate, ...]:
        """Return the ``top`` fastest, simulated in the order of bounds until no bound is lower.

        A candidate that takes `LISTED` times as long as the fastest, or longer than ``limit_s``, is
        left out, even if fewer than ``top`` remain. Before a candidate is simulated its bound is
        tightened, and the candidate goes back to its place in the order.
        """
        found: list[tuple[float, int, JudgedCandidate]] = []  # equal times in the order of bounds
        started: deque[tuple[int, Callable[[], JudgedCandidate]]] = deque()

        def finish_oldest() -> None:
            place, judged = started.popleft()
            choice = judged()
            self.judged[choice.candidate] = choice
            if self.fits(choice):  # slow copies to the host may free memory too late
                insort(found, (choice.iteration_s, place, choice))
                del found[top:]
            limit_s = min(most_s(), found[-1][0] if len(found) == top else inf)
            not_over = sum(seconds < limit_s for seconds, _, _ in waiting)
            self._progress(len(self.judged), len(self.judged) + not_over)

        def most_s() -> float:
            return min(limit_s, LISTED * found[0][0]) if found else limit_s

        items = sorted(among, key=lambda b: b.bound_s)
        waiting = [(item.bound_s, place, False) for place, item in enumerate(items)]
        while waiting:
            seconds, place, is_tight = heappop(waiting)
            item = items[place]
            if len(found) == top and seconds >= found[-1][0]:
                break
            if seconds > most_s():
                break
            if is_tight or item.candidate in self.judged:
                started.append((place, self._start(item)))
                if len(started) == self._at_once:
                    finish_oldest()
            else:
                heappush(waiting, (max(seconds, self.at_least_s(item)), place, True))
        while started:
            finish_oldest()
        return tuple(choice for seconds, _, choice in found if seconds <= most_s())

    def fastest(
        self, among: Iterable[Bounded], *, of_stock: bool, limit_s: float = inf
    ) -> tuple[JudgedCandidate, ...]:
        """Return the fastest candidate of stock, or of ours: one or none."""
        return self.best([b for b in among if b.candidate.is_stock == of_stock], 1, limit_s)

    def simulated(self, item: Bounded) -> JudgedCandidate:
        """Return a candidate's simulated time and memory."""
        choice = self.judged[item.candidate] = self._start(item)()
        return choice

    def _start(self, item: Bounded) -> Callable[[], JudgedCandidate]:
        """Begin to simulate an unknown candidate; return a function that waits for the result."""
        if (known := self.judged.get(item.candidate)) is not None:
            return lambda: known
        if self._pool is None:
            return partial(_simulated, item, self.limit_bytes)
        return self._pool.submit(_simulated, item, self.limit_bytes).result


def _simulated(item: Bounded, memory_bytes: float) -> JudgedCandidate:
    """Simulate a candidate, or extrapolate from iterations with fewer micro-batches."""
    candidate, choice = item.candidate, item.candidate.choice
    # The peak memory of these candidates depends on when actions run.
    has_curve = bool(candidate.offload or choice.splits or candidate.recompute_layers)
    has_curve |= bool(choice.where(recompute="early"))
    plain_bytes = item.device_bytes
    if not has_curve and has_exact_bytes(candidate):
        plain_bytes = exact_bytes(candidate, item.estimate)

    def simulated(candidate: Candidate) -> Timeline:
        return timeline_of(candidate, item.estimate, memory_bytes=memory_bytes)

    def measured(timeline: Timeline) -> tuple[float, ...]:
        """Return an iteration's seconds, peak bytes on device and host, and exposed seconds."""
        iteration_s, *exposed = measures(timeline)
        device_bytes, host_bytes = plain_bytes, 0.0
        if has_curve:
            ranks = memory(timeline, item.estimate.footprint)
            device_bytes = max(rank.device_peak for rank in ranks)
            host_bytes = max(rank.host_peak for rank in ranks)
        return iteration_s, device_bytes, host_bytes, *exposed

    line = None
    if candidate.offload or not has_curve:  # other curves are not linear where memory is full
        line = extrapolated(candidate, item.estimate, simulated, measured)
    found = measured(simulated(candidate)) if line is None else line
    iteration_s, device_bytes, host_bytes, *exposed = found
    return JudgedCandidate(candidate, iteration_s, device_bytes, Exposure(*exposed), host_bytes)
