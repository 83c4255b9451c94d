"""``--preemptive-comm``: the communicator as a feature of the executor.

It starts the collectives of DDP's buckets, in process groups of its own. Keeps one invariant:
nothing else uses these groups, so on every replica their collectives run in the order of the
buckets.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.fold3d.runtime.feature import Feature, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import (
    Ranks,
    bucket_groups,
    connect,
    group_of,
    ranks_of,
    set_group,
)
from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator
from megatron.fold3d.runtime.preemption.preemptive_group import PreemptiveGroup


class Preemption(Feature):
    """Connects, routes and closes the communicator; outlives all features that communicate.

    Args:
        communicator: the communicator that transfers and gradient sync use.
        timeout: the timeout of a collective.
    """

    def __init__(self, communicator: PreemptiveCommunicator, timeout: timedelta) -> None:
        self._communicator = communicator
        self._timeout = timeout
        self._is_connected = False

    def prepare(self, iteration: Iteration) -> None:
        """Connect to the neighbours in the first iteration; route the model's buckets."""
        if not self._is_connected:
            self._is_connected = True
            self._communicator.connect(_neighbours(iteration.pp_group, iteration.chunks))
            self._communicator.fit_slices(
                iteration.hidden_bytes, iteration.groups.dp_cp, iteration.device
            )
        if iteration.trains:
            _route_buckets(iteration.chunks, self._communicator, self._timeout)

    def drain(self, iteration: Iteration) -> None:
        """Log the communicator's non-fatal failures."""
        self._communicator.check()

    def close(self, error: BaseException | None) -> None:
        """Let communication in flight finish; after an error, notify all ranks instead."""
        self._communicator.close(error)


def _route_buckets(
    chunks: Sequence[torch.nn.Module],
    communicator: PreemptiveCommunicator,
    timeout: timedelta,
) -> None:
    """Let ``communicator`` reduce and gather the buckets of Megatron's DDP from now on.

    All ranks of the job call this together.
    """
    buckets = list(bucket_groups(*chunks))
    if any(isinstance(group_of(bucket_group), PreemptiveGroup) for bucket_group in buckets):
        return
    device = next(chunks[0].parameters()).device
    made = connect(map(group_of, buckets), device, timeout)
    ours = {ranks: communicator.group(group) for ranks, group in made.items()}
    for bucket_group in buckets:
        set_group(bucket_group, ours[ranks_of(group_of(bucket_group))])


def _neighbours(pp_group: dist.ProcessGroup, chunks: Sequence[torch.nn.Module]) -> set[int]:
    """Return the ranks next to this one in its pipeline and in its chunks' data-parallel groups."""
    groups = [pp_group, *map(group_of, bucket_groups(*chunks))]
    return {rank for group in groups for rank in _next_to_us(ranks_of(group))}


def _next_to_us(ranks: Ranks) -> Iterator[int]:
    ours = ranks.index(dist.get_rank())
    yield from (ranks[ours - 1], ranks[(ours + 1) % len(ranks)])
