"""Measure the links of a job: latency and bandwidth between pairs of ranks, one pair at a time.

All ranks call `measure` together. While one pair is measured the others wait, so the network is
otherwise idle.
"""

from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.fold3d.runtime.measure.timing import seconds, slowest

_ALL_PAIRS = 8  # ranks; of more, only neighbours in a ring are measured
_ROUND_TRIPS, _TRANSFERS = 20, 3
_BYTES = 4 << 20


class LinkSpeed(NamedTuple):
    """The measured link from one rank to another."""

    source: int
    target: int
    latency_s: float
    bytes_per_s: float


def pairs(world_size: int) -> list[tuple[int, int]]:
    """Return the pairs to measure: all of them in a small job, else the neighbours in a ring."""
    if world_size <= _ALL_PAIRS:
        return list(combinations(range(world_size), 2))
    return [(rank, (rank + 1) % world_size) for rank in range(world_size)]


def measure(chosen: Sequence[tuple[int, int]], device: torch.device) -> list[LinkSpeed]:
    """Return the links between the chosen pairs, the same on every rank.

    The default process group must be initialized.
    """
    word = torch.zeros(1, device=device)
    data = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    found = []
    for source, target in chosen:
        times_s = [0.0, 0.0]
        if dist.get_rank() in (source, target):
            times_s = [
                seconds(partial(_there_and_back, there, word, source, target), device, rounds)
                for there, rounds in ((word, _ROUND_TRIPS), (data, _TRANSFERS))
            ]
        trip_s, data_s = slowest(times_s, device)
        latency_s = trip_s / 2
        bytes_per_s = _BYTES / max(1e-9, data_s - latency_s)
        found.append(LinkSpeed(source, target, latency_s, bytes_per_s))
    return found


def _there_and_back(there: torch.Tensor, back: torch.Tensor, source: int, target: int) -> None:
    """Make a round trip, and wait until the host can read the answer.

    ``source`` sends ``there`` and ``target`` answers with ``back``. Both are contiguous, of any
    shape and on the device; on the other rank each is the receive buffer.
    """
    if dist.get_rank() == source:
        dist.send(there, target)
        dist.recv(back, target)
    else:
        dist.recv(there, source)
        dist.send(back, source)
    back.item()  # a device's receive is only queued when `recv` returns
