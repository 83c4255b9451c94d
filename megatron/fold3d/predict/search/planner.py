"""Choose a configuration: which schedule, how many segments, which (dp, pp, tp).

1. The costs alone give a candidate's memory, and a lower bound on the time of its iteration.
2. The candidates that fit are simulated in the order of their bounds, until no bound is below the
   best times found. A short simulation without DP.sync tightens a bound first.
3. Variations of the best ones follow, and other layers of their stages.

Our schedules and stock Megatron are searched side by side, so the answer can be that AIAO gains
nothing. Training runs every candidate as it was simulated.
"""

import os
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from heapq import heappop, heappush
from math import inf
from multiprocessing import get_context

from megatron.fold3d.observe.exposure import Exposure
from megatron.fold3d.observe.memory_curve import memory
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.policy.partition import Layers, best_partition
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.estimate import Estimate, estimate
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.placement import routes
from megatron.fold3d.predict.cost_model.recompute_by_stage import fewest_recomputed
from megatron.fold3d.predict.search.bounds import Bounded, bounded, earlier_s, exact_bytes
from megatron.fold3d.predict.search.candidate_estimate import estimate_of
from megatron.fold3d.predict.search.candidate_timeline import (
    computed,
    many_queues_s,
    timeline_of,
    undisturbed,
    without_grad_sync,
)
from megatron.fold3d.predict.search.candidates import FREE, Assumption, Candidate, Given, candidates
from megatron.fold3d.predict.search.infeasible import nothing_divides, nothing_fits
from megatron.fold3d.predict.search.many_microbatches import (
    extended,
    iteration_s,
    may_be_extended,
    measures,
)
from megatron.fold3d.predict.search.neighbours import (
    in_16_bits,
    neighbours,
    recomputed_and_paired,
    with_replicated_segments,
)
from megatron.fold3d.predict.search.rank_work import rank_times
from megatron.fold3d.predict.search.search_result import WORTHWHILE, JudgedCandidate, Search

USABLE_MEMORY = 0.85  # the rest is CUDA's, NCCL's and what the allocator cannot use
_MANY_GPUS = 1024  # from here on, a simulation takes longer than to hand it to another process
_AT_ONCE = 2
_COUNTED = 6  # how many of those that recompute all layers are tried with fewer
_LISTED = 1.2  # times as long as the fastest: nobody chooses what is slower
_IMPROVED = 3  # how many of the best candidates have their neighbours tried
_MOST_PARTITIONS = 12  # layouts that the best of ours and of stock are simulated with
_MOST_LAID_OUT = 20_000  # forwards of all these layouts
_MOST_FORWARDS = 60_000  # of an iteration with other groups


def search(
    shape: ModelShape,
    cluster: Cluster,
    *,
    global_batch_size: int,
    top: int = 10,
    given: Given = FREE,
    assumed: Set[Assumption] = frozenset(),
    progress: Callable[[int, int], None] = lambda done, all_: None,
) -> Search:
    """Return the fastest configurations that fit into memory.

    Args:
        shape: the model.
        cluster: all of its GPUs are used.
        global_batch_size: sequences per iteration.
        top: how many to return.
        given: the choices that the user has made.
        assumed: features that are tried although no GPU has timed them.
        progress: called with how many candidates were simulated, and how many there are.

    Raises:
        ValueError: nothing divides evenly, or nothing fits.
    """
    if global_batch_size < 1:
        raise ValueError(f"found global_batch_size={global_batch_size}; it is at least one")
    with _processes(cluster) as pool:
        judge = _Judge(shape, cluster, progress, pool)
        everything = [
            judge.bounded(c)
            for c in candidates(shape, cluster, global_batch_size, given, assumed)
            if judge.can_place(c)
        ]
        if not everything:
            raise ValueError(nothing_divides(shape, cluster, global_batch_size, given))
        if "offload" not in assumed:
            everything += map(judge.bounded, _that_memory_asks_to_offload(everything, judge.fits))
        everything += [*_that_shards_make_fit(everything, judge)]
        fitting = _quickest_of_each(filter(judge.fits, everything))
        kept = max(top, _IMPROVED)  # so that the answer is the same for every `top`
        best = judge.best(fitting, kept)
        stock = judge.fastest(fitting, of_stock=True)
        if not best:
            raise ValueError(
                nothing_fits(
                    shape,
                    cluster,
                    global_batch_size,
                    given,
                    found=[b for b in everything if b.host_bytes <= judge.host_limit_bytes],
                    bounds_on=lambda other: _Judge(shape, other, progress).bounded,
                    usable=USABLE_MEMORY,
                )
            )
        others = dict.fromkeys(
            other
            for choice in (*best[:_IMPROVED], *stock)
            for other in neighbours(choice.candidate, shape.num_layers, assumed)
            if judge.can_place(other)
            and (other.choice.group == choice.candidate.choice.group or judge.has_time_for(other))
            and not judge.only_placed_otherwise(other, choice.candidate)
        )
        others |= dict.fromkeys(_that_replicate(best[:_IMPROVED], tied=not shape.untied))
        if "recompute-layers" in assumed:
            for counted in judge.recomputing_less(fitting):
                others |= dict.fromkeys((counted, *recomputed_and_paired(counted, assumed)))
        known = {item.candidate for item in fitting}
        better = [judge.bounded(other) for other in others if other not in known]
        fitting += filter(judge.fits, better)
        stock = judge.fastest(fitting, of_stock=True)
        limit_s = _LISTED * min(choice.iteration_s for choice in (*best, *stock))
        ours = judge.fastest(fitting, of_stock=False, limit_s=limit_s)
        in_pipelines = [b for b in fitting if b.candidate.num_ranks > 1]
        piped = judge.fastest(in_pipelines, of_stock=True, limit_s=limit_s)
        balanced = [
            judge.bounded(other)
            for choice in dict.fromkeys((*ours, *stock, *piped))
            for other in judge.partitioned(choice)
            if other not in known
        ]
        better += balanced
        fitting += balanced
        stock = judge.fastest(fitting, of_stock=True)
        best = _plainest_first(judge.best(fitting, kept))
        found = Search(
            best=best[:top],
            best_stock=stock[0] if stock else None,
            considered=len(everything) + len(better),
            too_large=sum(not judge.fits(b) for b in everything),
            in_16_bits=_in_16_bits(
                judge, (*best[:_IMPROVED], *stock), fitting, tied=not shape.untied
            ),
            tried=tuple(judge.judged.values()),
        )
        return replace(found, many_queues_s=judge.with_many_queues(found.choice.candidate))


def _processes(cluster: Cluster) -> AbstractContextManager[Executor | None]:
    """Return processes that simulate beside each other, where simulations are long enough."""
    if cluster.num_gpus < _MANY_GPUS or len(os.sched_getaffinity(0)) == 1:
        return nullcontext()
    return ProcessPoolExecutor(_AT_ONCE, get_context("forkserver"))


class _Judge:
    """Bounds and simulates candidates of one model on one cluster, each of them once."""

    def __init__(
        self,
        shape: ModelShape,
        cluster: Cluster,
        progress: Callable[[int, int], None],
        pool: Executor | None = None,
    ) -> None:
        self._pool, self._at_once = pool, _AT_ONCE if pool else 1
        self.limit_bytes = cluster.gpu_memory_bytes * USABLE_MEMORY
        self.host_limit_bytes = cluster.host_memory_bytes * USABLE_MEMORY / cluster.gpus_per_node
        self._shape, self._cluster = shape, cluster
        self._of_sizes = cache(estimate)
        self._progress = progress
        self.judged: dict[Candidate, JudgedCandidate] = {}
        self._undisturbed_s: dict[Candidate, float] = {}

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the costs of a candidate."""
        return estimate_of(self._shape, self._cluster, candidate, self._of_sizes)

    def can_place(self, candidate: Candidate) -> bool:
        """Return True if nodes of a pipeline rank have equal ways through the switches."""
        try:
            routes(self._cluster, candidate.setup, candidate.num_ranks)
        except ValueError:
            return False
        return True

    def only_placed_otherwise(self, candidate: Candidate, other: Candidate) -> bool:
        """Return True if candidates differ in the order of ranks, which makes no difference."""
        orders = candidate.setup.order, other.setup.order
        return orders[0] != orders[1] and self.estimate(candidate) == self.estimate(other)

    def has_time_for(self, candidate: Candidate) -> bool:
        """Return False if an iteration is among the longest, and all of it has to be simulated."""
        c = candidate
        forwards = c.num_ranks * c.num_segments * c.num_microbatches
        return forwards <= _MOST_FORWARDS or may_be_extended(c, self.estimate(c))

    def bounded(self, candidate: Candidate) -> Bounded:
        """Return a candidate's bounds, without a simulation."""
        item = bounded(candidate, self.estimate(candidate))
        if item.device_bytes > self.limit_bytes and _has_exact_bytes(candidate):
            exact = exact_bytes(candidate, item.estimate, above=self.limit_bytes)
            item = replace(item, device_bytes=exact)
        if candidate.recompute_layers:  # stages differ; numbers were chosen to fit
            item = replace(item, device_bytes=min(item.device_bytes, self.limit_bytes))
        return item

    def partitioned(self, choice: JudgedCandidate) -> Iterator[Candidate]:
        """Yield a candidate with the layers of stages that make it fastest, if not its own."""
        c = choice.candidate
        stages = c.num_ranks * c.num_segments
        start = c.layers or (self._shape.num_layers // stages,) * stages
        most = min(_MOST_PARTITIONS, _MOST_LAID_OUT // (stages * c.num_microbatches))
        if c.num_ranks == 1 or most < 2:
            return

        def with_layers(layers: Layers) -> Candidate:
            even = replace(c, layers=layers if len(set(layers)) > 1 else ())
            return self._refitted(even) if c.recompute_layers else even

        best_s = inf

        def iteration_s(layers: Layers) -> float:
            """Return the seconds of a layout or, of one that is not the best, a bound on them."""
            nonlocal best_s
            try:
                item = self.bounded(with_layers(layers))
            except ValueError:  # not even with all layers recomputed
                return inf
            judged = self.judged.get(item.candidate)
            if judged is None and self.fits(item):
                if (least_s := self.at_least_s(item)) >= best_s:
                    return least_s
                judged = self.simulated(item)
            seconds = judged.iteration_s if judged is not None and self.fits(judged) else inf
            best_s = min(best_s, seconds)
            return seconds

        times = None
        are_alike = len({*map(self._shape.layer_flops, range(self._shape.num_layers))}) == 1
        if are_alike and not c.choice.pairs:  # a pair takes less than its halves
            alike = replace(c, recompute_layers=())
            times = rank_times(
                lambda layers: self.estimate(replace(alike, layers=layers)).costs,
                start,
                c.num_ranks,
                c.num_microbatches,
                may_keep_layers=bool(c.recompute_layers),
            )
        found = best_partition(start, iteration_s=iteration_s, times=times, most_simulated=most)
        if found.layers != start:
            yield with_layers(found.layers)

    def _refitted(self, candidate: Candidate) -> Candidate:
        """Return a candidate that recomputes as few layers as fit with its own split."""
        c = replace(candidate, recompute_layers=())
        footprint = self.estimate(c).footprint
        counts = fewest_recomputed(
            computed(c), self._shape, c.setup, footprint, self.limit_bytes, c.layers
        )
        return replace(c, recompute_layers=counts)

    def recomputing_less(self, among: Sequence[Bounded]) -> Iterator[Candidate]:
        """Yield the most promising candidates that recompute all layers, with as few as fit."""
        every_layer = (
            item
            for item in among
            if item.candidate.setup.recompute == "full"
            and not (item.candidate.is_stock or item.candidate.offload)
        )
        for item in sorted(every_layer, key=lambda item: item.bound_s)[:_COUNTED]:
            yield self._refitted(item.candidate)

    def fits(self, known: Bounded | JudgedCandidate) -> bool:
        """Return True if the GPU's memory, and its share of the host's, are enough."""
        host_fits = known.host_bytes <= self.host_limit_bytes
        return known.device_bytes <= self.limit_bytes and host_fits

    def at_least_s(self, item: Bounded) -> float:
        """Return a tighter lower bound than the costs alone give, from a short simulation.

        Only delayed weight gradients could hide the first segment's DP.sync.
        """
        if item.candidate.choice.fills_gaps:  # its order is not known before it is simulated
            return item.bound_s
        alone = without_grad_sync(item.candidate)
        if alone not in self._undisturbed_s:
            simulated = partial(undisturbed, estimate=item.estimate)
            self._undisturbed_s[alone] = iteration_s(alone, item.estimate, simulated)
        sync_s = 0.0 if alone.choice.splits else item.estimate.costs.grad_sync_s[0]
        inside_s = earlier_s(item.candidate, item.estimate)
        return self._undisturbed_s[alone] + max(0.0, sync_s - inside_s)

    def best(
        self, among: Iterable[Bounded], top: int, limit_s: float = inf
    ) -> tuple[JudgedCandidate, ...]:
        """Simulate in the order of the bounds until none can be among the best any more.

        What takes `_LISTED` times as long as the fastest, or longer than ``limit_s``, is not among
        the best, however few these are.
        A bound is tightened before its candidate is simulated, and then waits for its turn again.
        """
        found: list[tuple[float, int, JudgedCandidate]] = []  # of equals, by the bound at first
        started: deque[tuple[int, Callable[[], JudgedCandidate]]] = deque()

        def end_one() -> None:
            place, judged = started.popleft()
            choice = judged()
            self.judged[choice.candidate] = choice
            if self.fits(choice):  # a slow copy stream frees memory late
                insort(found, (choice.iteration_s, place, choice))
                del found[top:]
            limit_s = min(most_s(), found[-1][0] if len(found) == top else inf)
            not_over = sum(seconds < limit_s for seconds, _, _ in waiting)
            self._progress(len(self.judged), len(self.judged) + not_over)

        def most_s() -> float:
            return min(limit_s, _LISTED * found[0][0]) if found else limit_s

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
                    end_one()
            else:
                heappush(waiting, (max(seconds, self.at_least_s(item)), place, True))
        while started:
            end_one()
        return tuple(choice for seconds, _, choice in found if seconds <= most_s())

    def fastest(
        self, among: Iterable[Bounded], *, of_stock: bool, limit_s: float = inf
    ) -> tuple[JudgedCandidate, ...]:
        """Return the fastest of stock, or of ours, if there is any."""
        return self.best([b for b in among if b.candidate.is_stock == of_stock], 1, limit_s)

    def with_many_queues(self, candidate: Candidate) -> tuple[float, float] | None:
        """Return `many_queues_s` of a candidate that shares one queue and does not take long."""
        known = self.estimate(candidate)
        forwards = candidate.num_ranks * candidate.num_segments * candidate.num_microbatches
        if known.cuda_connections != 1 or forwards > _MOST_FORWARDS:
            return None
        return many_queues_s(candidate, known, memory_bytes=self.limit_bytes)

    def simulated(self, item: Bounded) -> JudgedCandidate:
        """Return what a candidate is judged to be."""
        choice = self.judged[item.candidate] = self._start(item)()
        return choice

    def _start(self, item: Bounded) -> Callable[[], JudgedCandidate]:
        """Begin to simulate a candidate, unless it was; return what waits for it."""
        if (known := self.judged.get(item.candidate)) is not None:
            return lambda: known
        if self._pool is None:
            return partial(_simulated, item, self.limit_bytes)
        return self._pool.submit(_simulated, item, self.limit_bytes).result


def _has_exact_bytes(candidate: Candidate) -> bool:
    """Return True if the most that a GPU holds follows from the order, and is not bounded by it."""
    return candidate.num_segments > 1 and not candidate.offload


def _simulated(item: Bounded, memory_bytes: float) -> JudgedCandidate:
    """Judge a candidate; of very many micro-batches, from iterations with fewer."""
    candidate, choice = item.candidate, item.candidate.choice
    # The most that a GPU holds is only known from what happens when.
    has_curve = bool(candidate.offload or choice.splits or candidate.recompute_layers)
    has_curve |= bool(choice.where(recompute="early"))
    plain_bytes = item.device_bytes
    if not has_curve and _has_exact_bytes(candidate):
        plain_bytes = exact_bytes(candidate, item.estimate)

    def simulated(candidate: Candidate) -> Timeline:
        return timeline_of(candidate, item.estimate, memory_bytes=memory_bytes)

    def measured(timeline: Timeline) -> tuple[float, ...]:
        """Return the iteration, bytes on the device and on the host, and the exposure."""
        iteration_s, *exposed = measures(timeline)
        device_bytes, host_bytes = plain_bytes, 0.0
        if has_curve:
            ranks = memory(timeline, item.estimate.footprint)
            device_bytes = max(rank.device_peak for rank in ranks)
            host_bytes = max(rank.host_peak for rank in ranks)
        return iteration_s, device_bytes, host_bytes, *exposed

    line = None
    if candidate.offload or not has_curve:  # what else has a curve may bend where memory is full
        line = extended(candidate, item.estimate, simulated, measured)
    found = measured(simulated(candidate)) if line is None else line
    iteration_s, device_bytes, host_bytes, *exposed = found
    return JudgedCandidate(candidate, iteration_s, device_bytes, Exposure(*exposed), host_bytes)


def _plainest_first(best: tuple[JudgedCandidate, ...]) -> tuple[JudgedCandidate, ...]:
    """Put a plainer variant of the best choice first if it is at most 1% slower.

    `auto` is plainer than a given share: training measures better than a simulation predicts.
    Delaying or replicating nothing is plainer than holding memory for it to gain under 1%.
    """
    first = best[0]
    own = first.candidate
    delayed = own.choice.where(wgrad="last")
    for plainer in (
        own.with_options(ahead=None),
        own.changed(wgrad="backward"),
        own.changed(delayed[:-1], wgrad="backward"),
        own.changed(optimizer="sharded"),
        own.changed(step="next").with_options(share=None),
    ):
        for choice in best[1:]:
            slow = choice.iteration_s > (1 + WORTHWHILE) * first.iteration_s
            if choice.candidate == plainer and not slow:
                return choice, *(other for other in best if other is not choice)
    return best


def _that_memory_asks_to_offload(
    all_: Sequence[Bounded], fits: Callable[[Bounded], bool]
) -> Iterator[Candidate]:
    """Yield AIAO with offload for the splits of the model in which no AIAO fits without it.

    Only then is offload, which no GPU has timed, worth recommending.
    """

    def split(c: Candidate) -> tuple[object, ...]:
        sizes = c.setup.tensor_parallel, c.setup.microbatch_size
        return c.num_ranks, c.num_segments, c.layers, *sizes

    aiao = [b for b in all_ if b.candidate.schedule == "aiao" and b.candidate.num_segments > 1]
    fitting = {split(b.candidate) for b in aiao if fits(b)}
    for item in aiao:
        if split(item.candidate) not in fitting:
            yield replace(item.candidate, offload=True)


def _that_shards_make_fit(all_: Sequence[Bounded], judge: "_Judge") -> Iterator[Bounded]:
    """Yield AIAO in shards where memory has no room for it whole, with as few shards as will do.

    What fits whole gains nothing from shards: they only add an all-gather. Gradients in shards add
    no traffic to that of parameters.
    """
    for item in all_:
        c = item.candidate
        sharded = c.setup.distributed_optimizer and c.setup.num_replicas > 1
        freed = c.schedule == "aiao" and c.num_segments > 2 and not c.offload
        if not (sharded and freed) or c.choice.carries or judge.fits(item):
            continue
        for shards in ("weights", "gradients"):
            if judge.fits(bounded := judge.bounded(replace(c, shards=shards))):
                yield bounded
                break


def _that_replicate(best: Iterable[JudgedCandidate], *, tied: bool) -> Iterator[Candidate]:
    """Yield the best choice that can replicate segments with some of them.

    They only move DP.sync from the forward to the backward: where it is hidden, nothing is gained.
    """
    for choice in best:
        exposed = choice.exposed.share(choice.exposed.grad_sync_s) >= WORTHWHILE
        found = list(with_replicated_segments(choice.candidate, tied=tied)) if exposed else []
        if found:
            yield from found
            return


def _in_16_bits(
    judge: "_Judge", best: Iterable[JudgedCandidate], fitting: Iterable[Bounded], *, tied: bool
) -> tuple[JudgedCandidate, ...]:
    """Return the best of ours and of stock whose gradients travel in 16 bits, if any fits.

    Their sizes are those of the best without.
    """

    def sizes(c: Candidate) -> tuple[object, ...]:
        setup = replace(c.setup, distributed_optimizer=False)
        return setup, c.num_ranks, c.num_segments, c.layers

    known = {sizes(choice.candidate) for choice in best}
    alike = [item.candidate for item in fitting if sizes(item.candidate) in known]
    rounded = [judge.bounded(other) for c in alike for other in in_16_bits(c, tied=tied)]
    fit = [*filter(judge.fits, rounded)]
    return (*judge.fastest(fit, of_stock=False), *judge.fastest(fit, of_stock=True))


def _quickest_of_each(among: Iterable[Bounded]) -> list[Bounded]:
    """Keep, of candidates that differ only in recomputation, the one that recomputes least.

    All that offload are kept: for them, less recomputation means more to copy.
    """
    chosen: dict[Candidate, Bounded] = {}
    for item in sorted(among, key=lambda b: (b.bound_s, b.device_bytes)):
        c = item.candidate
        setup = c.setup if c.offload else replace(c.setup, recompute="none")
        chosen.setdefault(replace(c, setup=setup), item)
    return list(chosen.values())
