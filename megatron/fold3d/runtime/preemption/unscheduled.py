"""The scheduler's interface without its extension: all starts at once, nothing waits for its turn.

Keeps one invariant: what is computed is the same, slice by slice; only the timing differs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class DirectTask:
    """Works that run already."""

    def __init__(self, works: Sequence[Any], name: str) -> None:
        self._works = works
        self.name = name

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until all are over; ``timeout_s`` is their group's."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            error.add_note(f"fold3d: waited for {self.name}")
            raise

    def is_completed(self) -> bool:
        """Whether all are over, as far as the backend tells."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """Return what is complete when all are over, if the backend tells."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


class Unscheduled:
    """What `_scheduler.Scheduler` has, run on the calling thread."""

    def send(self, group: dist.ProcessGroup, tensor: torch.Tensor, *rest: Any) -> DirectTask:
        """Start to send."""
        return _transfer(group.send, tensor, *rest)

    def receive(self, group: dist.ProcessGroup, tensor: torch.Tensor, *rest: Any) -> DirectTask:
        """Start to receive."""
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
        """Start all slices."""
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
        """Start all slices: some elements of our share, and of everybody's."""
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
        """Start all slices: some elements of our share, and of everybody's."""
        return DirectTask([group.allgather([parts], [ours]) for ours, parts in slices], name)

    def announce(self, _peer: int, _direction: int, _eta_s: float) -> None:
        """Nothing waits for a transfer."""

    def fail(self, _error: str) -> None:
        """Waits end with their group's timeout."""

    def shutdown(self, _timeout_s: float) -> bool:
        """Nothing is to be stopped."""
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
