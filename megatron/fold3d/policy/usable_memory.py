"""How much of the memory that is free may be planned with: one rule for all that is measured."""

USABLE = 0.9
"""Usable part of free memory; the rest is for fragmentation, other processes and variation."""


def usable_bytes(free_bytes: float) -> float:
    """Return how much may be predicted to be taken of memory that is free; more is never tried."""
    return USABLE * max(0.0, free_bytes)
