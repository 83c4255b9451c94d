"""Variations of a candidate, which a search tries on the best candidates alone."""

from collections.abc import Iterator, Set
from dataclasses import replace

from megatron.fold3d.plan.schedule_word import Segments
from megatron.fold3d.predict.cost_model.coded_sync import Codes, summed_bits
from megatron.fold3d.predict.cost_model.sizes import Order
from megatron.fold3d.predict.search.candidates import Assumption, Candidate, group_sizes


def neighbours(
    candidate: Candidate, num_layers: int, assumed: Set[Assumption] = frozenset()
) -> Iterator[Candidate]:
    """Yield candidates that differ from this one in one choice."""
    yield from _with_other_groups(candidate)
    yield from _with_lighter_last_stage(candidate, num_layers)
    yield from with_other_sums(candidate)
    yield from _with_other_forwards_ahead(candidate)
    yield from recomputed_and_paired(candidate, assumed)
    yield from in_other_rank_order(candidate)
    if "delay-weight-grads" in assumed and candidate.shards == "off":
        yield from _with_placed_weight_grads(candidate)
        yield from _with_delayed_weight_grads(candidate)


def recomputed_and_paired(candidate: Candidate, assumed: Set[Assumption]) -> Iterator[Candidate]:
    """Yield variants with recomputation before the gradient arrives, with pairs, and with both."""
    c = candidate
    if c.is_stock or c.offload or c.choice.splits:
        return
    early = "recompute-early" in assumed and c.setup.recompute == "full"
    # Training refuses pairs beside these.
    alone = not (c.choice.carries or c.preemptive or c.choice.group) and c.shards == "off"
    sends = c.setup.tensor_parallel > 1 or c.setup.expert_parallel > 1
    paired = "overlap-tensor-parallel" in assumed and sends and alone
    for recompute in ("late", "early")[: 1 + early]:
        for pairs in (None, True)[: 1 + (paired and c.num_microbatches > 1)]:
            other = c.changed(recompute=recompute).with_options(pairs=pairs)
            if other != c:
                yield other


def _with_other_groups(candidate: Candidate) -> Iterator[Candidate]:
    """Yield other sizes of groups, between one micro-batch per rank and all micro-batches."""
    ranks, microbatches = candidate.num_ranks, candidate.num_microbatches
    if candidate.schedule == "interleaved":
        for size in group_sizes(ranks, microbatches):
            if ranks < size < microbatches:
                yield candidate.with_options(group=size)


def with_other_sums(candidate: Candidate) -> Iterator[Candidate]:
    """Yield stock with DP.sync that is not aligned over ranks, or in several optimizer instances.

    An instance reduces to shards among neighbours, sums the shards over all instances, and gathers
    parameters among neighbours. In a pipeline, stock gets its first batch wrong if also aligned.
    """
    setup = candidate.setup
    if not candidate.is_stock or setup.most_replicas == 1:
        return
    if candidate.num_segments > 1 and candidate.aligned:
        yield replace(candidate, aligned=False)
    if setup.distributed_optimizer and setup.expert_parallel == setup.context_parallel == 1:
        for instances in range(2, setup.data_parallel):
            if setup.data_parallel % instances == 0 and instances != setup.optimizer_instances:
                in_several = replace(setup, optimizer_instances=instances)
                yield replace(candidate, setup=in_several, aligned=candidate.num_ranks == 1)


def _with_lighter_last_stage(candidate: Candidate, num_layers: int) -> Iterator[Candidate]:
    """Yield the candidate with one layer moved from the last stage, which has the head."""
    ranks, num_stages = candidate.num_ranks, candidate.num_ranks * candidate.num_segments
    layers = list(candidate.layers or (num_layers // num_stages,) * num_stages)
    if ranks > 1 and layers[-1] > 1:
        layers[-1] -= 1
        layers[(ranks - 1) // 2] += 1
        yield replace(candidate, layers=tuple(layers))


def _with_other_forwards_ahead(candidate: Candidate) -> Iterator[Candidate]:
    """Yield variants with more forwards ahead, for slow transfers, and fewer, for less memory."""
    if candidate.is_stock or candidate.offload or candidate.num_ranks == 1:
        return
    if candidate.schedule == "aiao":
        yield candidate.with_options(ahead=1)
    yield candidate.with_options(ahead=3)


def in_other_rank_order(candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate in the other order of pipeline ranks and replicas: see `Order`."""
    setup = candidate.setup
    if candidate.num_ranks > 1 and setup.data_parallel > 1:
        order: Order = "tp-pp-dp" if setup.order == "tp-dp-pp" else "tp-dp-pp"
        yield replace(candidate, setup=replace(setup, order=order))


def units(num_segments: int, *, tied: bool) -> tuple[Segments, ...]:
    """Return the sets of segments that every replica may step in full: each segment alone.

    Args:
        tied: whether the first and the last segment share parameters, and so form one set.
    """
    ends = {0, num_segments - 1} if tied else set()
    single = tuple((s,) for s in range(num_segments) if s not in ends)
    return (*single, tuple(sorted(ends))) if ends else single


def with_replicated_segments(candidate: Candidate, *, tied: bool) -> Iterator[Candidate]:
    """Yield a candidate with one segment that every replica steps in full, or with all of them.

    A replicated segment's gradients are all-reduced, which takes as long as a reduce-scatter and an
    all-gather, and its parameters are not gathered. So traffic moves from the next forward to the
    backward. This shortens the iteration if all-gathers take longer than the forwards, and
    reduce-scatters less time than the backwards.

    Args:
        tied: whether the first and last segment share word embeddings and are replicated together.
    """
    setup, ranks = candidate.setup, candidate.num_ranks
    sharded = setup.distributed_optimizer and setup.most_replicas > 1 and candidate.shards == "off"
    alone = not (candidate.choice.carries or candidate.preemptive or candidate.offload)
    if candidate.is_stock or not (sharded and alone):
        return
    choices = units(candidate.num_segments, tied=tied and ranks > 1)
    every = tuple(range(candidate.num_segments))
    for segments in dict.fromkeys((*choices, every)):
        yield candidate.changed(segments, optimizer="replicated")


def in_16_bits(candidate: Candidate, *, tied: bool) -> Iterator[Candidate]:
    """Yield the candidate with gradients summed in 16 bits, the least rounding first.

    Training refuses all-to-alls beside some choices. Megatron refuses them for a chunk with more
    than one bucket, which tied word embeddings cause.
    """
    c, setup = candidate, candidate.setup
    if setup.fp32 or setup.small_gradients or setup.most_replicas == 1:
        return
    rounded = replace(setup, small_gradients=True)
    local = replace(rounded, accumulates_in_fp32=True)
    cut = c.choice.where(optimizer="replicated") or c.choice.where(wgrad="behind")
    refused = cut or c.preemptive or (tied and c.num_ranks > 1)
    if setup.distributed_optimizer and setup.optimizer_instances == 1 and not refused:
        yield replace(c, setup=replace(local, scatters_in_fp32=True))
    yield replace(c, setup=local)
    yield replace(c, setup=rounded)


def with_codes(candidate: Candidate, codes: Codes) -> Iterator[Candidate]:
    """Yield the candidate with all codes that training has for it, and with those of gathers.

    Coded sums hold messages in memory until the end of an iteration.
    """
    c, setup = candidate, candidate.setup
    sharded = setup.distributed_optimizer and setup.most_replicas > 1
    if not sharded or c.shards != "off" or c.choice.carries:
        return
    bits = 0.0 if setup.fp32 else codes.gathered_bits
    plain = setup.optimizer_instances == 1 and not (setup.scatters_in_fp32 or c.preemptive)
    if codes.sums and plain:
        added = c.num_microbatches if codes.unfused else None
        summed = summed_bits(setup.gradient_bytes, added)
        yield replace(c, setup=replace(setup, gathered_bits=bits, summed_bits=summed))
    if bits:
        yield replace(c, setup=replace(setup, gathered_bits=bits))


def _with_placed_weight_grads(candidate: Candidate) -> Iterator[Candidate]:
    """Yield AIAO with weight gradients in gaps, for several numbers of forwards ahead."""
    if candidate.is_stock or candidate.offload or candidate.schedule != "aiao":
        return
    for ahead in (None, 1, 3):
        yield candidate.changed(wgrad="gaps").with_options(ahead=ahead)


def _with_delayed_weight_grads(candidate: Candidate) -> Iterator[Candidate]:
    """Yield AIAO with delayed weight gradients of one or two segments in the middle or at the end.

    The delayed computation hides DP.sync of the first segment, whose parameters are needed at once.
    DP.sync of the delayed segments is pushed to the end of the iteration, and so reaches into the
    next one, where their forwards come late.
    """
    setup, segments = candidate.setup, candidate.num_segments
    if candidate.schedule != "aiao" or candidate.offload or setup.most_replicas == 1:
        return
    setups = [setup]
    if not candidate.choice.carries:
        candidate = candidate.changed(step="next")
        if setup.distributed_optimizer:
            setups.append(replace(setup, distributed_optimizer=False))
    middle = segments // 2
    for chosen in ((segments - 1,), (middle, segments - 1), (middle - 1, middle)):
        if chosen[0] > 0 and len(set(chosen)) == len(chosen):
            for each_setup in setups:
                yield replace(candidate, setup=each_setup).changed(chosen, wgrad="last")
