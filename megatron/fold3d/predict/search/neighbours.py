"""Variations that are worth trying on a good candidate, and too many to try on all."""

from collections.abc import Iterator, Set
from dataclasses import replace

from megatron.fold3d.predict.search.candidates import Assumption, Candidate

SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)  # of every segment, where auto has one for each


def neighbours(
    candidate: Candidate, num_layers: int, assumed: Set[Assumption] = frozenset()
) -> Iterator[Candidate]:
    """Yield candidates that differ from a good one in one choice."""
    yield from _with_other_groups(candidate)
    yield from _with_a_lighter_end(candidate, num_layers)
    if candidate.backward_share == "auto" and candidate.num_segments > 1:
        for share in SHARES:
            yield replace(candidate, backward_share=share)
    if "delay-weight-grads" in assumed:
        yield from _with_delayed_weight_grads(candidate)


def _with_other_groups(candidate: Candidate) -> Iterator[Candidate]:
    """Micro-batch groups between one per rank and all."""
    ranks, microbatches = candidate.num_ranks, candidate.num_microbatches
    if candidate.schedule == "interleaved":
        for size in range(ranks + 1, microbatches):
            if microbatches % size == 0:
                yield replace(candidate, group_size=size)


def _with_a_lighter_end(candidate: Candidate, num_layers: int) -> Iterator[Candidate]:
    """Move one layer from the last stage, which has the head, to a rank in the middle."""
    ranks, num_stages = candidate.num_ranks, candidate.num_ranks * candidate.num_segments
    layers = list(candidate.layers or (num_layers // num_stages,) * num_stages)
    if ranks > 1 and layers[-1] > 1:
        layers[-1] -= 1
        layers[(ranks - 1) // 2] += 1
        yield replace(candidate, layers=tuple(layers))


def _with_delayed_weight_grads(candidate: Candidate) -> Iterator[Candidate]:
    """Delay the weight gradients of one or two segments: those in the middle, or the last.

    Their DP.sync is not needed until their turn in the next forward. The first segment's is needed
    at once, so it is the one to hide. The DP.sync that a delay pushes to the end of the iteration
    has to reach into the next one.
    """
    setup, segments = candidate.setup, candidate.num_segments
    if candidate.schedule != "aiao" or candidate.offload or setup.data_parallel == 1:
        return
    if candidate.backward_share is None:
        whole = replace(setup, distributed_optimizer=False)
        candidate = replace(candidate, setup=whole, backward_share="auto")
    middle = segments // 2
    for chosen in ((segments - 1,), (middle, segments - 1), (middle - 1, middle)):
        if chosen[0] > 0 and len(set(chosen)) == len(chosen):
            yield replace(candidate, delayed_weight_grads=chosen)
