"""Which segments every replica steps in full, although the optimizer is distributed.

A replicated segment's gradients are all-reduced, which takes as long as a reduce-scatter and an
all-gather of them, and its parameters are not gathered. So its bytes move from the next forward to
the backward. This shortens the iteration if the all-gathers take longer than the forwards, and the
reduce-scatters less time than the backwards.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain

from megatron.fold3d.plan.schedule_word import Segments

SMALLEST_GAIN = 0.002  # mean gain per segment, relative to an iteration; memory is worth more

Chosen = frozenset[Segments]


def units(num_segments: int, *, tied: bool) -> tuple[Segments, ...]:
    """Return the units of the choice: single segments, and segments that must go together.

    Args:
        num_segments: segments per rank.
        tied: whether the first and the last segment share parameters, and so go together.
    """
    ends = {0, num_segments - 1} if tied else set()
    single = tuple((s,) for s in range(num_segments) if s not in ends)
    return (*single, tuple(sorted(ends))) if ends else single


def choose_replicated(
    choices: Sequence[Segments],
    seconds: Callable[[Segments], float],
    fits: Callable[[Segments], bool] = lambda _: True,
    *,
    begins: Sequence[Segments] | None = None,
) -> tuple[Segments, float]:
    """Return the segments to replicate, and the predicted seconds of an iteration.

    The search adds or removes the unit that shortens the iteration most, until none does. Then it
    tries to exchange one unit for another.

    Args:
        choices: the candidates, from `units`.
        seconds: returns the time of an iteration in which some segments are replicated.
        fits: whether memory has room for some replicated segments.
        begins: where the search begins, once each; by default with none and with all segments.
    """
    known = cache(seconds)
    every = frozenset(choices)
    if begins is None:
        begins = (), tuple(chain.from_iterable(choices))

    def spelled(some: Chosen) -> Segments:
        return tuple(sorted(chain.from_iterable(some)))

    def price(some: Chosen) -> float:
        segments = spelled(some)
        return known(segments) * (1 + SMALLEST_GAIN * len(segments))

    def toggled(some: Chosen) -> Iterator[Chosen]:
        return (some ^ {choice} for choice in choices)

    def exchanged(some: Chosen) -> Iterator[Chosen]:
        return (some - {old} | {new} for old in some for new in every - some)

    def improved(some: Chosen) -> Chosen | None:
        for moves in (toggled, exchanged):  # there are many exchanges: only if all else fails
            fitting = (other for other in moves(some) if fits(spelled(other)))
            better = min(fitting, key=price, default=some)
            if price(better) < price(some):
                return better
        return None

    def descended(some: Chosen) -> Chosen:
        while (better := improved(some)) is not None:
            some = better
        return some

    starts = [frozenset(unit for unit in choices if {*unit} <= {*begin}) for begin in begins]
    fitting = [some for some in starts if not some or fits(spelled(some))]
    best = spelled(min(map(descended, fitting), key=price))
    return best, known(best)
