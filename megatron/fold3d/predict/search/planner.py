"""Choose a configuration: the schedule, the number of segments, the parallel sizes.

1. A candidate's costs give its memory, and a lower bound on the time of its iteration.
2. The candidates that fit are simulated in the order of their bounds, until no bound is below the
   best times found. A short simulation without DP.sync first tightens a bound.
3. Variations of the best candidates follow, and other numbers of layers in their stages.

Our schedules and stock Megatron are searched side by side, so the answer can be that AIAO gains
nothing. Training can run every candidate as it was simulated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from math import inf
from typing import Any

from megatron.fold3d.policy.partition import Layers, best_partition
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.coded_sync import NO_CODES, Codes
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.recompute_by_stage import fewest_recomputed
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.best_first import (
    LISTED,
    MOST_FORWARDS,
    BestFirst,
    processes,
)
from megatron.fold3d.predict.search.bounds import Bounded, rank_times
from megatron.fold3d.predict.search.candidate_timeline import computed, many_queues_s
from megatron.fold3d.predict.search.candidates import FREE, Assumption, Candidate, candidates
from megatron.fold3d.predict.search.infeasible import no_fit_message, no_split_message
from megatron.fold3d.predict.search.neighbours import (
    in_16_bits,
    in_other_rank_order,
    neighbours,
    recomputed_and_paired,
    with_codes,
    with_replicated_segments,
)
from megatron.fold3d.predict.search.search_result import WORTHWHILE, JudgedCandidate, Search

_MOST_COUNTED = 6  # candidates with full recomputation that are tried with fewer recomputed layers
_MOST_IMPROVED = 3  # best candidates whose neighbours are tried
_MOST_PARTITIONS = 12  # layouts of layers that are simulated for each of the best candidates
_MOST_LAID_OUT = 20_000  # forwards in the simulations of these layouts


def search(
    shape: ModelShape,
    cluster: Cluster,
    *,
    global_batch_size: int,
    top: int = 10,
    given: Mapping[str, Any] = FREE,
    assumed: Set[Assumption] = frozenset(),
    codes: Codes = NO_CODES,
    progress: Callable[[int, int], None] = lambda done, all_: None,
) -> Search:
    """Return the fastest configurations that fit into memory.

    Args:
        cluster: all of its GPUs are used.
        assumed: features to try although no GPU has timed them.
        codes: what training may code; the fastest are tried with it and without.
        progress: called with the numbers of simulated candidates, and of all that may follow.

    Raises:
        ValueError: nothing divides evenly, or nothing fits.
    """
    if global_batch_size < 1:
        raise ValueError(f"found global_batch_size={global_batch_size}; it is at least one")
    with processes(cluster) as pool:
        judge = BestFirst(shape, cluster, progress, pool)
        everything = [
            judge.bounded(c)
            for c in candidates(shape, cluster, global_batch_size, given, assumed)
            if judge.can_place(c)
        ]
        if not everything:
            raise ValueError(no_split_message(shape, cluster, global_batch_size, given))
        everything += [
            judge.bounded(other)
            for item in everything
            for other in in_other_rank_order(item.candidate)
            if judge.can_place(other) and not judge.differ_only_in_rank_order(other, item.candidate)
        ]
        if "offload" not in assumed:
            everything += map(judge.bounded, _offload_variants(everything, judge.fits))
        everything += [*_sharded_variants(everything, judge)]
        plain = _without_slower_recomputation(filter(judge.fits, everything))
        fitting = [*plain]
        kept = max(top, _MOST_IMPROVED)  # so that the answer is the same for every `top`
        best = judge.best(fitting, kept)
        stock = judge.fastest(fitting, of_stock=True)
        stock = stock and _strongest_stock(judge, stock[0].candidate, plain)
        if not best:
            raise ValueError(
                no_fit_message(
                    shape,
                    cluster,
                    global_batch_size,
                    given,
                    found=[b for b in everything if b.host_bytes <= judge.host_limit_bytes],
                )
            )
        others = dict.fromkeys(
            other
            for choice in (*best[:_MOST_IMPROVED], *stock)
            for other in neighbours(choice.candidate, shape.num_layers, assumed)
            if judge.can_place(other)
            and (other.choice.group == choice.candidate.choice.group or judge.is_affordable(other))
            and not judge.differ_only_in_rank_order(other, choice.candidate)
        )
        others |= dict.fromkeys(choice.candidate for choice in stock)
        others |= dict.fromkeys(_replicated_variants(best[:_MOST_IMPROVED], tied=not shape.untied))
        if "recompute-layers" in assumed:
            for counted in _with_fewer_recomputed(judge, fitting):
                others |= dict.fromkeys((counted, *recomputed_and_paired(counted, assumed)))
        known = {item.candidate for item in fitting}
        better = [judge.bounded(other) for other in others if other not in known]
        fitting += filter(judge.fits, better)
        stock = judge.fastest(fitting, of_stock=True)
        limit_s = LISTED * min(choice.iteration_s for choice in (*best, *stock))
        ours = judge.fastest(fitting, of_stock=False, limit_s=limit_s)
        in_pipelines = [b for b in fitting if b.candidate.num_ranks > 1]
        piped = judge.fastest(in_pipelines, of_stock=True, limit_s=limit_s)
        balanced = [
            judge.bounded(other)
            for choice in dict.fromkeys((*ours, *stock, *piped))
            for other in _partitioned(judge, choice)
            if other not in known
        ]
        better += balanced
        fitting += balanced
        stock = judge.fastest(fitting, of_stock=True)
        best = _plainest_first(judge.best(fitting, kept))
        rounded = partial(in_16_bits, tied=not shape.untied)
        coded = partial(with_codes, codes=codes)
        found = Search(
            best=best[:top],
            best_stock=stock[0] if stock else None,
            considered=len(everything) + len(better),
            too_large=sum(not judge.fits(b) for b in everything),
            in_16_bits=_varied(judge, (*best[:_MOST_IMPROVED], *stock), fitting, rounded),
            coded=_varied(judge, (*best[:_MOST_IMPROVED], *stock), fitting, coded),
            tried=tuple(judge.judged.values()),
        )
        if chosen := found.ours:
            alike = _strongest_stock(judge, chosen.candidate, plain)
            strongest = min((*stock, *alike), key=lambda choice: choice.iteration_s, default=None)
            found = replace(found, best_stock=strongest, same_layout=next(iter(alike), None))
        return replace(found, many_queues_s=_with_many_queues(judge, found.choice.candidate))


def strongest_stock(shape: ModelShape, cluster: Cluster, ours: Candidate) -> JudgedCandidate | None:
    """Return stock's fastest configuration in the layout of one of ours, if any fits.

    Precision, micro-batches and all parallel sizes stay. Segments, groups, layers, recomputation
    and optimizer are searched, as in `search`.
    """
    setup = ours.setup
    bare = replace(setup, distributed_optimizer=False, order=Setup().order)
    bare = replace(bare, gathered_bits=0.0, summed_bits=0.0)
    given = asdict(bare) | {"num_ranks": ours.num_ranks}
    del given["recompute"]
    batch = ours.num_microbatches * setup.data_parallel * setup.microbatch_size
    judge = BestFirst(shape, cluster)
    of_stock = (c for c in candidates(shape, cluster, batch, given) if c.is_stock)
    found = map(judge.bounded, filter(judge.can_place, of_stock))
    plain = _without_slower_recomputation(filter(judge.fits, found))
    return next(iter(_strongest_stock(judge, ours, plain)), None)


def judged(shape: ModelShape, cluster: Cluster, candidate: Candidate) -> JudgedCandidate:
    """Return one candidate's predicted time and memory, whether or not it fits into memory."""
    judge = BestFirst(shape, cluster)
    return judge.simulated(judge.bounded(candidate))


def _partitioned(judge: BestFirst, choice: JudgedCandidate) -> Iterator[Candidate]:
    """Yield the candidate with the fastest numbers of layers per stage, if other than its own."""
    c = choice.candidate
    stages = c.num_ranks * c.num_segments
    start = c.layers or (judge.shape.num_layers // stages,) * stages
    most = min(_MOST_PARTITIONS, _MOST_LAID_OUT // (stages * c.num_microbatches))
    if c.num_ranks == 1 or most < 2:
        return

    def with_layers(layers: Layers) -> Candidate:
        even = replace(c, layers=layers if len(set(layers)) > 1 else ())
        return _refitted(judge, even) if c.recompute_layers else even

    best_s = inf

    def iteration_s(layers: Layers) -> float:
        """Return the seconds of a layout, or a lower bound if that shows it is not the best."""
        nonlocal best_s
        try:
            item = judge.bounded(with_layers(layers))
        except ValueError:  # not even with all layers recomputed
            return inf
        judged = judge.judged.get(item.candidate)
        if judged is None and judge.fits(item):
            if (least_s := judge.at_least_s(item)) >= best_s:
                return least_s
            judged = judge.simulated(item)
        seconds = judged.iteration_s if judged is not None and judge.fits(judged) else inf
        best_s = min(best_s, seconds)
        return seconds

    times = None
    are_alike = len({*map(judge.shape.layer_flops, range(judge.shape.num_layers))}) == 1
    if are_alike and not c.choice.pairs:  # a pair takes less than its halves
        alike = replace(c, recompute_layers=())
        times = rank_times(
            lambda layers: judge.estimate(replace(alike, layers=layers)).costs,
            start,
            c.num_ranks,
            c.num_microbatches,
            may_keep_layers=bool(c.recompute_layers),
        )
    found = best_partition(start, iteration_s=iteration_s, times=times, most_simulated=most)
    if found.layers != start:
        yield with_layers(found.layers)


def _refitted(judge: BestFirst, candidate: Candidate) -> Candidate:
    """Return the candidate with the fewest recomputed layers with which it fits into memory."""
    c = replace(candidate, recompute_layers=())
    footprint = judge.estimate(c).footprint
    counts = fewest_recomputed(
        computed(c), judge.shape, c.setup, footprint, judge.limit_bytes, c.layers
    )
    return replace(c, recompute_layers=counts)


def _with_fewer_recomputed(judge: BestFirst, among: Sequence[Bounded]) -> Iterator[Candidate]:
    """Yield the most promising candidates with full recomputation, recomputing fewer layers."""
    every_layer = (
        item
        for item in among
        if item.candidate.setup.recompute == "full"
        and not (item.candidate.is_stock or item.candidate.offload)
    )
    for item in sorted(every_layer, key=lambda item: item.bound_s)[:_MOST_COUNTED]:
        with suppress(ValueError):  # memory beside the activations had a closer bound before
            yield _refitted(judge, item.candidate)


def _strongest_stock(
    judge: BestFirst, ours: Candidate, among: Iterable[Bounded]
) -> tuple[JudgedCandidate, ...]:
    """Return the fastest of stock's candidates, and of their variations, in the layout of ours.

    It is one or none; the fastest variation is varied once more.
    """
    alike = [b for b in among if b.candidate.is_stock and b.candidate.layout == ours.layout]

    def varied(those: Iterable[Candidate]) -> Iterator[Bounded]:
        others = (o for c in those for o in neighbours(c, judge.shape.num_layers))
        found = (o for o in others if judge.can_place(o) and judge.is_affordable(o))
        return filter(judge.fits, map(judge.bounded, dict.fromkeys(found)))

    alike += [*varied(item.candidate for item in alike)]
    alike += [*varied(choice.candidate for choice in judge.fastest(alike, of_stock=True))]
    for choice in judge.fastest(alike, of_stock=True):
        alike += map(judge.bounded, _partitioned(judge, choice))
    return judge.fastest(alike, of_stock=True)


def _with_many_queues(judge: BestFirst, candidate: Candidate) -> tuple[float, float] | None:
    """Return `many_queues_s` of a candidate with one queue, unless its simulation is long."""
    known = judge.estimate(candidate)
    forwards = candidate.num_ranks * candidate.num_segments * candidate.num_microbatches
    if known.cuda_connections != 1 or forwards > MOST_FORWARDS:
        return None
    return many_queues_s(candidate, known, memory_bytes=judge.limit_bytes)


def _plainest_first(best: tuple[JudgedCandidate, ...]) -> tuple[JudgedCandidate, ...]:
    """Put a plainer variant of the best choice first if it is at most 1% slower.

    A plainer variant delays fewer weight gradients, or replicates nothing, to hold less memory.
    """
    first = best[0]
    own = first.candidate
    delayed = own.choice.where(wgrad="last")
    for plainer in (
        own.with_options(ahead=None),
        own.changed(wgrad="backward"),
        own.changed(delayed[:-1], wgrad="backward"),
        own.changed(optimizer="sharded"),
    ):
        for choice in best[1:]:
            slow = choice.iteration_s > (1 + WORTHWHILE) * first.iteration_s
            if choice.candidate == plainer and not slow:
                return choice, *(other for other in best if other is not choice)
    return best


def _offload_variants(
    all_: Sequence[Bounded], fits: Callable[[Bounded], bool]
) -> Iterator[Candidate]:
    """Yield AIAO with offload for each split of the model in which AIAO does not fit otherwise.

    Otherwise offload, which no GPU has timed, is not recommended.
    """

    def split(c: Candidate) -> tuple[object, ...]:
        sizes = c.setup.tensor_parallel, c.setup.microbatch_size
        return c.num_ranks, c.num_segments, c.layers, *sizes

    aiao = [b for b in all_ if b.candidate.schedule == "aiao" and b.candidate.num_segments > 1]
    fitting = {split(b.candidate) for b in aiao if fits(b)}
    for item in aiao:
        if split(item.candidate) not in fitting:
            yield replace(item.candidate, offload=True)


def _sharded_variants(all_: Sequence[Bounded], judge: BestFirst) -> Iterator[Bounded]:
    """Yield AIAO with sharded weights, or also sharded gradients, where it does not fit otherwise.

    A candidate that fits gains nothing from shards, since sharded weights add an all-gather.
    Sharded gradients add no further traffic.
    """
    for item in all_:
        c = item.candidate
        sharded = c.setup.distributed_optimizer and c.setup.most_replicas > 1
        freed = c.schedule == "aiao" and c.num_segments > 2 and not c.offload
        if not (sharded and freed) or c.choice.carries or judge.fits(item):
            continue
        for shards in ("weights", "gradients"):
            if judge.fits(bounded := judge.bounded(replace(c, shards=shards))):
                yield bounded
                break


def _replicated_variants(best: Iterable[JudgedCandidate], *, tied: bool) -> Iterator[Candidate]:
    """Yield variants with replicated segments of the best candidate that may gain from them.

    Replication moves DP.sync from the forward to the backward. Only exposed DP.sync can gain.
    """
    for choice in best:
        exposed = choice.exposed.share(choice.exposed.grad_sync_s) >= WORTHWHILE
        found = list(with_replicated_segments(choice.candidate, tied=tied)) if exposed else []
        if found:
            yield from found
            return


def _varied(
    judge: BestFirst,
    best: Sequence[JudgedCandidate],
    fitting: Iterable[Bounded],
    variants: Callable[[Candidate], Iterable[Candidate]],
) -> tuple[JudgedCandidate, ...]:
    """Return the fastest variant of ours and of stock, if faster than the best without variation.

    Only variants of candidates in the layouts of ``best`` are compared.

    Args:
        variants: yields the variants of a candidate.
    """

    def sizes(c: Candidate) -> tuple[object, ...]:
        setup = replace(c.setup, distributed_optimizer=False)
        return setup, c.num_ranks, c.num_segments, c.layers

    known = {sizes(choice.candidate) for choice in best}
    alike = [item.candidate for item in fitting if sizes(item.candidate) in known]
    fit = [*filter(judge.fits, (judge.bounded(other) for c in alike for other in variants(c)))]
    found = (*judge.fastest(fit, of_stock=False), *judge.fastest(fit, of_stock=True))
    return tuple(
        choice
        for choice in found
        if all(
            choice.iteration_s < other.iteration_s
            for other in best
            if other.candidate.is_stock == choice.candidate.is_stock
        )
    )


def _without_slower_recomputation(among: Iterable[Bounded]) -> list[Bounded]:
    """Of candidates that differ only in recomputation, keep the fastest by its bound.

    All candidates with offload are kept, since less recomputation means more copies for them.
    """
    chosen: dict[Candidate, Bounded] = {}
    for item in sorted(among, key=lambda b: (b.bound_s, b.device_bytes)):
        c = item.candidate
        setup = c.setup if c.offload else replace(c.setup, recompute="none")
        chosen.setdefault(replace(c, setup=setup), item)
    return list(chosen.values())
