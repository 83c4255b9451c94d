"""The schedules of Zero Bubble (Qi et al., ICLR 2024): 1F1B with split backwards.

They place weight gradients as if all computations took equally long; `place_weight_grads` uses
given times.
"""

from collections.abc import Iterator

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.schedules import one_f_one_b


def zb_h1(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield ZB-H1: 1F1B whose weight gradients fill its bubble (Sec. 2.1).

    Rank r runs 1F1B's ``p - 1 - r`` forwards ahead and delays the weight gradients of r
    micro-batches. Backwards come first, since another rank waits for them. Each rank holds at most
    p micro-batches, as many as the first rank of 1F1B. Rank 3 of p=4, m=5:

        F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 W2 W3 W4
    """
    order = one_f_one_b(rank, num_ranks, num_microbatches)
    yield from _split(order, rank, num_microbatches, delayed=rank)


def zb_h2(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Yield ZB-H2: twice as far ahead as ZB-H1, without a bubble (Sec. 2.2).

    Rank r runs ``2 (p - 1 - r)`` forwards ahead and delays the weight gradients of 2 r
    micro-batches: each rank holds up to ``2 p - 1``. Where forwards, backwards and weight gradients
    are equally long, no rank waits between its first forward and its last weight gradient. Ranks
    begin and end one after the other, so the full gain needs iterations that begin on a rank
    before all other ranks have ended the previous one.
    """
    order = one_f_one_b(rank, num_ranks, num_microbatches, forwards_ahead=2)
    yield from _split(order, rank, num_microbatches, delayed=2 * rank)


def _split(
    order: Iterator[Action], rank: int, num_microbatches: int, *, delayed: int
) -> Iterator[Action]:
    """Yield an order in which each weight gradient runs ``delayed`` backwards after its own."""
    delayed = min(delayed, num_microbatches)
    for stage, op, microbatch in order:
        yield Action(stage, op, microbatch)
        if op is Op.BACKWARD and microbatch is not None and microbatch >= delayed:
            yield Action(stage, Op.WEIGHT, microbatch - delayed)
    for microbatch in range(num_microbatches - delayed, num_microbatches):
        yield Action(rank, Op.WEIGHT, microbatch)
