"""The number of segments, by the paper's rule or from the times of whole iterations.

More segments hide more of DP.sync and shrink the bubble. But each further segment sends every
micro-batch through all ranks once more, and adds overhead.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """A number of segments and the reason for it.

    Attributes:
        layers: the number of layers of each stage; empty if all stages have equally many.
    """

    num_segments: int
    reason: str
    layers: tuple[int, ...] = ()


def by_rule(
    options: Iterable[int],
    *,
    compute_s: float,
    message_s: float,
    grad_sync_s: float,
    num_microbatches: int,
) -> Segments:
    """Return the paper's ns (Sec. IV): raise ns while computation hides overlapped communication.

    Args:
        options: numbers of segments that divide the layers.
    """
    microbatches = num_microbatches
    hidden_s = {
        ns: overlapping_s(2 * ns * microbatches * message_s, grad_sync_s, ns, microbatches)
        for ns in sorted(options)  # twice: messages of forwards and of backwards
    }
    fitting = list(takewhile(lambda ns: hidden_s[ns] <= compute_s, hidden_s))
    chosen, verb = (fitting[-1], "fit") if fitting else (min(hidden_s), "do not even fit")
    return Segments(
        num_segments=chosen,
        reason=f"{hidden_s[chosen]:.3g} s of PP.sync and DP.sync {verb} behind {compute_s:.3g} s "
        f"of computation with {chosen} segments",
    )


def by_iteration_time(iteration_s: Mapping[int, float], tolerance: float) -> Segments:
    """Return the number of segments with the shortest iteration; of equal times, the fewest.

    Args:
        tolerance: the relative difference up to which two times count as equal.
    """
    shortest_s = min(iteration_s.values()) * (1 + tolerance)
    best = min(segments for segments, time_s in iteration_s.items() if time_s <= shortest_s)
    times = ", ".join(f"{segments}: {time_s:.3g} s" for segments, time_s in iteration_s.items())
    return Segments(num_segments=best, reason=f"simulated iterations by segments: {times}")


def overlapping_s(
    p2p_s: float, grad_sync_s: float, num_segments: int, num_microbatches: int
) -> float:
    """Return the paper's T_ol (eq. 4): (ms - 1)/ms T_pp + (ns - 1)/ns T_dp.

    The paper also subtracts T_comp, which is not done here, since eq. 2 already takes the maximum.
    """
    first_microbatch, first_segment = p2p_s / num_microbatches, grad_sync_s / num_segments
    return (p2p_s - first_microbatch) + (grad_sync_s - first_segment)
