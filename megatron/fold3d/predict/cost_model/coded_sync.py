"""The bits that coded DP.sync sends of a parameter and of a gradient, and the rate of coding.

A step of Adam moves a parameter by a share of the learning rate. Counted in units of the last
place, small parameters move further than large ones. So the bits depend on the learning rate
divided by the deviation of parameters. The curve is fitted to 11 trainings in bf16, after 50 and
more steps: 4 layers of hidden size 256, learning rates from 3e-5 to 6e-4, deviations of 0.006 and
0.02. Its error is at most 0.2 bits. First steps take 1 to 2.5 bits more, grown parameters fewer.

``--coded-grad-reduce`` takes 11.1 bits for the upper 16 of a gradient in a model of the same sizes,
from the first step to the 20th, and 10.8 for Gaussian ones. The lower 16 of fp32
stay whole, but for sums of bf16 gradients: Gaussian ones take 0, 3.3, 6.1 and 10.6 bits if 1, 2, 8
and 64 were added, and 6.6 for 8 in the model.
"""

from math import inf, log2
from typing import NamedTuple

_SCALE, _POWER = 116, 0.87
_LONGEST = 0.4
"""Bits by which the longest shard's message exceeds the mean; all-gathers pad to the longest."""
_UPPER_BITS = 11.1
_ROOM = 33 / 32  # of a message, larger than the message
CODED_BYTES_PER_S = 4e11
"""Bytes of a shard that a GPU codes a second: from an A100's memory rate, not measured."""


class Codes(NamedTuple):
    """What training may code: see `Setup.gathered_bits` and `Setup.summed_bits`."""

    gathered_bits: float = 0.0
    sums: bool = False
    unfused: bool = False
    """Whether bf16 gradients of micro-batches are added up outside of matmuls."""


NO_CODES = Codes()


def summed_bits(gradient_bytes: int, num_added: int | None = None) -> float:
    """Return how many bits of a gradient a coded sum sends.

    Args:
        num_added: of how many bf16 gradients it is the sum; None if they were added in a matmul.
    """
    lower_bits = 8.0 * gradient_bytes - 16
    if num_added is not None:
        lower_bits = min(lower_bits, 0.0 if num_added == 1 else 1.8 + 1.5 * log2(num_added))
    return (_UPPER_BITS + lower_bits) * _ROOM


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
