"""Transfers that preempt DP.sync: paper Algorithm 2, on any backend of torch.distributed.

Keeps one invariant: one thread starts all transfers and gradient reductions of a rank. Within a
process group they start in the order of the calls.
"""

import atexit
import importlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.policy.grad_sync_cuts import slice_bytes
from megatron.fold3d.runtime.feature import Feature, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import (
    bucket_groups,
    connect,
    group_of,
    ranks_of,
    set_group,
)
from megatron.fold3d.runtime.measure.lanes import all_reduces, message_s
from megatron.fold3d.runtime.preemption.control_sockets import connections
from megatron.fold3d.runtime.preemption.preemptive_group import PreemptiveGroup

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 10.0
_LARGE = 1 << 20  # bytes


class PreemptiveCommunicator(Feature):
    """Makes process groups that share one scheduler; a context manager that closes it.

    In a run, it starts the collectives of DDP's buckets, and outlives all features that
    communicate.

    Args:
        slice_bytes: the size of a slice, or the largest one that `fit_slices` may choose.
        fits_slices: whether `fit_slices` may choose a smaller size.

    Raises:
        ValueError: the extension has not been built.
    """

    evaluates = True  # transfers go through it

    def __init__(self, *, slice_bytes: int, timeout: timedelta, fits_slices: bool = False) -> None:
        self._slice_bytes = slice_bytes
        self._fits_slices = fits_slices
        built = extension()
        if built is None:
            raise ValueError(
                "--preemptive-comm: its C++ scheduler is not built, and nothing stands in for it; "
                "run: make extension"
            )
        self._extension, self._policy = built, built.Policy()
        self._policy.timeout_s = timeout.total_seconds()
        self._scheduler: Any = None
        self._links: Any = None
        self._open = ExitStack()

    def prepare(self, iteration: Iteration) -> None:
        """Connect to the neighbours in the first iteration; route the model's buckets."""
        if self._scheduler is None:
            self.connect(_neighbours(iteration.pp_group, iteration.chunks))
            self.fit_slices(iteration.hidden_bytes, iteration.groups.dp_cp, iteration.device)
        if iteration.trains:
            self._route_buckets(iteration.chunks)

    def connect(self, neighbours: Iterable[int]) -> None:
        """Start the scheduler's thread and connect to the neighbours of this rank.

        All ranks of the job call this together. Ranks report failures to their neighbours, which
        pass them on. The previous and next global rank are always neighbours, so a failure reaches
        every rank.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        self._policy.rank = rank
        self._scheduler = self._extension.Scheduler(self._policy)
        atexit.register(self.close)
        if world > 1:
            ring = {(rank - 1) % world, (rank + 1) % world}
            opened = self._open.enter_context(connections({*neighbours, *ring} - {rank}))
            self._links = self._extension.ControlLinks(self._scheduler, opened)

    def fit_slices(
        self, transfer_bytes: int, dp_group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Choose the slice size to use beside transfers of ``transfer_bytes``, from now on.

        All ranks of the job call this together. They measure at the same time, and the slowest
        counts, so that all make the same slices. Nothing happens if the user has chosen a size.
        """
        if not self._fits_slices:
            return
        # The launch cost is the time of a one-element all-reduce. The difference of two sizes would
        # not show this cost: a link may let the first bytes of each message through at once.
        element = torch.zeros(1, device=device)
        launch_s = message_s(lambda: dist.all_reduce(element, group=dp_group), device)
        per_byte_s = all_reduces(dp_group, _LARGE, device).s_per_byte
        self._slice_bytes = slice_bytes(transfer_bytes, self._slice_bytes, per_byte_s, launch_s)
        if dist.get_rank() == 0:
            logger.info(
                "DP.sync in slices of %s bytes: to start one takes %.3g ms, a byte %.3g ns; "
                "--schedule ...:slice-bytes=%s repeats it",
                *(self._slice_bytes, 1e3 * launch_s, 1e9 * per_byte_s, self._slice_bytes),
            )

    def group(self, group: dist.ProcessGroup, direction: int = 0) -> PreemptiveGroup:
        """Return a process group that schedules the communication of ``group``."""
        assert self._scheduler is not None, "connect first"
        waiters = self._extension.Waiter(), self._extension.Waiter()
        return PreemptiveGroup(group, self._scheduler, waiters, self._slice_bytes, direction)

    def statistics(self) -> Any:
        """Return the scheduler's counters."""
        return self._scheduler.statistics()

    def drain(self, iteration: Iteration) -> None:
        """Log failures of the control links that did not end the job."""
        self._log_warnings()

    def _log_warnings(self) -> None:
        for warning in self._links.warnings() if self._links is not None else ():
            logger.warning("rank %s: %s", dist.get_rank(), warning)

    def close(self, error: BaseException | None = None) -> None:
        """Stop when nothing is in flight; after an ``error``, notify all ranks and stop at once."""
        atexit.unregister(self.close)
        if self._scheduler is None:
            return
        if error is not None:
            self._scheduler.fail(f"rank {dist.get_rank()} failed: {_one_line(error)}")
        if not self._scheduler.shutdown(_SHUTDOWN_S):
            logger.warning("communication was cut short after %s s", _SHUTDOWN_S)
        if self._links is not None:
            self._log_warnings()
            self._links.close()
        self._open.close()
        self._scheduler = self._links = None

    def _route_buckets(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Reduce and gather the buckets of Megatron's DDP from now on; all ranks call it together.

        The process groups are new ones. Nothing else uses them, so on every replica their
        collectives run in the order of the buckets.
        """
        buckets = list(bucket_groups(*chunks))
        if any(isinstance(group_of(bucket_group), PreemptiveGroup) for bucket_group in buckets):
            return
        device = next(chunks[0].parameters()).device
        made = connect(map(group_of, buckets), device)
        ours = {ranks: self.group(group) for ranks, group in made.items()}
        for bucket_group in buckets:
            set_group(bucket_group, ours[ranks_of(group_of(bucket_group))])


def _neighbours(pp_group: dist.ProcessGroup, chunks: Sequence[torch.nn.Module]) -> Iterator[int]:
    """Yield the ranks next to this one in its pipeline and in its chunks' data-parallel groups."""
    for group in (pp_group, *map(group_of, bucket_groups(*chunks))):
        ranks = ranks_of(group)
        ours = ranks.index(dist.get_rank())
        yield from (ranks[ours - 1], ranks[(ours + 1) % len(ranks)])


def extension() -> ModuleType | None:
    """Return the extension, if it has been built."""
    try:
        return importlib.import_module("megatron.fold3d.runtime.preemption._scheduler")
    except ImportError:
        return None


def _one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
