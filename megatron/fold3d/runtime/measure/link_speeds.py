"""Measure the links of a job: latency and bandwidth between pairs of ranks, one pair at a time.

All ranks call `measure` together. While one pair is measured the others wait, so the network is
otherwise idle.
"""

import time
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

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
    here = dist.get_rank()
    found = []
    for source, target in chosen:
        dist.barrier()
        if here in (source, target):
            link = _measure(source, target, device)
            if here == source:
                found.append(link)
    gathered: list[list[LinkSpeed]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, found)
    return [LinkSpeed(*link) for links in gathered for link in links]


def _measure(source: int, target: int, device: torch.device) -> LinkSpeed:
    word = torch.zeros(1, device=device)
    data = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    _there_and_back(word, word, source, target)  # connects the two
    _there_and_back(data, word, source, target)
    trips_s = [_there_and_back(word, word, source, target) for _ in range(_ROUND_TRIPS)]
    latency_s = median(trips_s) / 2
    transfers_s = [_there_and_back(data, word, source, target) for _ in range(_TRANSFERS)]
    return LinkSpeed(source, target, latency_s, _BYTES / max(1e-9, median(transfers_s) - latency_s))


def _there_and_back(there: torch.Tensor, back: torch.Tensor, source: int, target: int) -> float:
    """Return the seconds of a round trip, until the host can read the answer.

    ``source`` sends ``there`` and ``target`` answers with ``back``. Both are contiguous, of any
    shape and on the device; on the other rank each is the receive buffer.
    """
    start_s = time.perf_counter()
    if dist.get_rank() == source:
        dist.send(there, target)
        dist.recv(back, target)
        back.item()  # a device's receive is only queued when `recv` returns
    else:
        dist.recv(there, source)
        dist.send(back, source)
        back.item()
    return time.perf_counter() - start_s
