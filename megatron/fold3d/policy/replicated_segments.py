"""Which segments every replica steps in full, although the optimizer is distributed.

A replicated segment's gradients are all-reduced, which takes as long as a reduce-scatter and an
all-gather of them, and its parameters are not gathered. So its bytes move from the next forward to
the backward. This shortens the iteration if the all-gathers take longer than the forwards, and the
reduce-scatters less time than the backwards.
"""

from megatron.fold3d.plan.schedule_word import Segments


def units(num_segments: int, *, tied: bool) -> tuple[Segments, ...]:
    """Return the units of the choice: single segments, and segments that must go together.

    Args:
        num_segments: segments per rank.
        tied: whether the first and the last segment share parameters, and so go together.
    """
    ends = {0, num_segments - 1} if tied else set()
    single = tuple((s,) for s in range(num_segments) if s not in ends)
    return (*single, tuple(sorted(ends))) if ends else single
