"""How many layers each stage holds where stages cannot hold equally many."""

from megatron.fold3d.policy.partition import over_segments


def layers_of_stages(num_layers: int, num_ranks: int, num_segments: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, as even as possible over ranks, then over stages.

    The remainder goes to the ranks in the middle, since the first has the embedding and the last
    the head. Within a rank it goes to the first segments.
    """
    each, left = divmod(num_layers, num_ranks)
    order = [*range(1, num_ranks - 1), 0, num_ranks - 1]
    of_rank = [each] * num_ranks
    for rank in order[:left] if num_ranks > 1 else ():
        of_rank[rank] += 1
    return over_segments(of_rank, num_segments)
