"""The scheduler's interface without the extension: every call starts at once, nothing is queued.

Keeps one invariant: the results are the same, slice by slice; only the timing differs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class DirectTask:
    """A task over works that have been started."""

    def __init__(self, works: Sequence[Any], name: str) -> None:
        self._works = works
        self.name = name

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all works; ``timeout_s`` is ignored, the group's own timeout holds."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            error.add_note(f"fold3d: waited for {self.name}")
            raise

    def is_completed(self) -> bool:
        """True if all works report that they are completed."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """Return a future that completes with all works, if the backend has futures."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


class Unscheduled:
    """The methods of `_scheduler.Scheduler`, run on the calling thread.

    Its stub documents the shapes, owners and streams of tensors.
    """

    def send(self, group: dist.ProcessGroup, tensor: torch.Tensor, *rest: Any) -> DirectTask:
        """Start to send ``tensor``, contiguous and of any shape."""
        return _transfer(group.send, tensor, *rest)

    def receive(self, group: dist.ProcessGroup, tensor: torch.Tensor, *rest: Any) -> DirectTask:
        """Start to receive into ``tensor``, contiguous and of the sent shape."""
        return _transfer(group.recv, tensor, *rest)

    def all_reduce(
        self,
        group: dist.ProcessGroup,
        slices: Sequence[torch.Tensor],
        _waiter: object,
        op: dist.ReduceOp,
        _lane: int,
        name: str,
    ) -> DirectTask:
        """Start an in-place all-reduce of every slice, ``[n]``."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return DirectTask([group.allreduce([part], options) for part in slices], name)

    def reduce_scatter(
        self,
        group: dist.ProcessGroup,
        slices: Sequence[tuple[torch.Tensor, list[torch.Tensor]]],
        _waiter: object,
        op: dist.ReduceOp,
        _lane: int,
        name: str,
    ) -> DirectTask:
        """Start a reduce-scatter of every slice: a piece of our shard and of every rank's.

        All pieces of a slice are ``[n]``; ours gets the result.
        """
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        works = [group.reduce_scatter([ours], [parts], options) for ours, parts in slices]
        return DirectTask(works, name)

    def all_gather(
        self,
        group: dist.ProcessGroup,
        slices: Sequence[tuple[torch.Tensor, list[torch.Tensor]]],
        _waiter: object,
        _lane: int,
        name: str,
    ) -> DirectTask:
        """Start an all-gather of every slice: a piece of our shard and of every rank's.

        All pieces of a slice are ``[n]``; every rank's get the result.
        """
        return DirectTask([group.allgather([parts], [ours]) for ours, parts in slices], name)

    def announce(self, _peer: int, _direction: int, _eta_s: float) -> None:
        """Do nothing: no slice waits for a transfer."""

    def fail(self, _error: str) -> None:
        """Do nothing: waits end with their group's timeout."""

    def shutdown(self, _timeout_s: float) -> bool:
        """Return True: there is nothing to stop."""
        return True


def _transfer(
    start: Callable[..., Any],
    tensor: torch.Tensor,
    _waiter: object,
    group_peer: int,
    tag: int,
    _peer: int,
    _direction: int,
    name: str,
) -> DirectTask:
    return DirectTask([start([tensor], group_peer, tag)], name)
