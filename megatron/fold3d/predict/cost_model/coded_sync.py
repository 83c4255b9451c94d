"""The bits that coded DP.sync sends of a parameter and of a gradient, and the rate of coding.

A step of Adam moves a parameter by a share of the learning rate. Counted in units of the last
place, small parameters move further than large ones. So the bits depend on the learning rate
divided by the deviation of parameters. The curve is fitted to 11 trainings in bf16, after 50 and
more steps: 4 layers of hidden size 256, learning rates from 3e-5 to 6e-4, deviations of 0.006 and
0.02. Its error is at most 0.2 bits. First steps take 1 to 2.5 bits more, grown parameters fewer.

``--coded-grad-reduce`` takes 11.1 bits for the upper 16 of a gradient in a model of the same sizes,
from the first step to the 20th, and 10.8 for Gaussian ones. The lower 16 of fp32 count whole, as
after fused accumulation. Without it they take 0, 3, 6 and 11 bits for sums of 1, 2, 8 and 64 bf16
gradients, and a run's ``--schedule auto`` counts what it measured.
"""

from math import inf, log2
from typing import NamedTuple

_SCALE, _POWER = 116, 0.87
_LONGEST = 0.4
"""Bits by which the longest shard's message exceeds the mean; all-gathers pad to the longest."""
_UPPER_BITS = 11.1 * 33 / 32  # the room of a message is larger than the message
CODED_BYTES_PER_S = 4e11
"""Bytes of a shard that a GPU codes a second: from an A100's memory rate, not measured."""


class Codes(NamedTuple):
    """What training may code: see `Setup.gathered_bits` and `Setup.codes_sums`."""

    gathered_bits: float = 0.0
    sums: bool = False


NO_CODES = Codes()


def coded_share(gradient_bytes: int) -> float:
    """Return which part of the bytes of gradients a coded sum sends."""
    lower_bits = 8 * gradient_bytes - 16
    return (lower_bits + _UPPER_BITS) / (8 * gradient_bytes)


def coded_bits(learning_rate: float, deviation: float) -> float:
    """Return how many of a parameter's 16 bits are gathered.

    Args:
        learning_rate: the training's highest rate, near which it stays longest.
        deviation: the standard deviation of initial parameters.

    Raises:
        ValueError: one of them cannot be.
    """
    if not (0 <= learning_rate < inf and 0 < deviation < inf):
        raise ValueError(
            f"--lr {learning_rate} and --init-method-std {deviation}: no rate is below zero, and "
            "deviations are above it; give other numbers"
        )
    return 1 + log2(1 + _SCALE * (learning_rate / deviation) ** _POWER) + _LONGEST
