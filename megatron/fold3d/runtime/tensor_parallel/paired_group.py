"""A process group whose collectives hand the baton over while they run.

Keeps one invariant: a collective starts when it is called, so all ranks of the group start their
collectives in the same order. Only waiting for a collective lets the other micro-batch run.
"""

import threading
from collections.abc import Callable
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from megatron.fold3d.runtime.events import Events
from megatron.fold3d.upstream.versions import collective, with_collectives


@with_collectives
class PairedGroup(dist.ProcessGroup):
    """The ranks of ``group``, with collectives whose `wait` first calls ``hand_over``.

    These are the collectives of tensor-parallel layers and of experts: all-reduce, all-gather,
    reduce-scatter and all-to-all of one tensor. All other calls are passed on to ``group``.

    Tensors are the caller's: contiguous, of any dtype, and complete on the stream that is current
    at the call. The caller keeps them alive and unwritten until it has waited. Each of the four
    returns a work; results are valid on the stream that is current in its ``wait``. Torch's own
    functions give all of them their arguments, and options last. An all-gather gathers ``[n, ...]``
    of each rank into ``[size * n, ...]``, in the order of ranks. A reduce-scatter is its inverse.

    Args:
        hand_over: lets the other micro-batch run.
        recorder: gets each of these collectives, from its launch to its end.
        name: what a trace calls them, ``TP.sync`` or ``EP.sync``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hand_over: Callable[[], None],
        recorder: Events,
        name: str,
    ) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # an overload
        self.group = group
        self._hand_over = hand_over
        self._recorder = recorder
        self._name = name
        self._together = threading.local()  # works that a thread has started, and not waited for
        # torch's own functions look a group up by its object.
        known = dist.distributed_c10d._world
        known.pg_map[self] = known.pg_map[group]
        known.pg_group_ranks[self] = known.pg_group_ranks[group]
        known.pg_names[self] = known.pg_names[group]

    def begin_together(self) -> None:
        """From here to `end_together`, start collectives of this thread and wait for none."""
        self._together.works = []

    def end_together(self) -> None:
        """Hand the baton over once, and wait for what was started together when it is back."""
        works, self._together.works = self._together.works, None
        if works:
            self._hand_over()
        for work in works:
            work.finish()

    def barrier(self, opts: Any = None) -> Any:
        """Start a barrier, without a hand-over; the group's own backend chooses the device."""
        return dist.barrier(group=self.group, async_op=True)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend that does the work."""
        return str(dist.get_backend(self.group))

    def _start(self, method: str, *arguments: Any) -> Any:
        name = collective(method)
        # A call that waits at once would run on NCCL's stream of the caller, and overlap nothing.
        arguments[-1].asyncOp = True
        kind = self._name.lower().replace(".", "_")
        (launched,), end = self._recorder.collective(
            self._name, kind, lambda: [getattr(self.group, name)(*arguments)]
        )
        work = _PairedWork(launched, self._hand_over, end)
        if getattr(self._together, "works", None) is None:
            return work
        self._together.works.append(work)
        return SimpleNamespace(wait=lambda *_timeout: True)  # `end_together` waits

    def _pass_on(self, method: str, *arguments: Any) -> Any:
        """Start a collective without a hand-over."""
        return getattr(self.group, method)(*arguments)

    allreduce = partialmethod(_start, "allreduce")
    all_gather_single = partialmethod(_start, "all_gather_single")
    reduce_scatter_single = partialmethod(_start, "reduce_scatter_single")
    all_to_all_single = partialmethod(_start, "all_to_all_single")
    broadcast = partialmethod(_pass_on, "broadcast")
    allgather = partialmethod(_pass_on, "allgather")


class _PairedWork:
    """A collective in flight; its first `wait` lets the other micro-batch run."""

    def __init__(self, work: Any, hand_over: Callable[[], None], end: Callable[[], None]) -> None:
        self._work = work
        self._hand_over = hand_over
        self._end = end
        self._is_over = False

    def wait(self, *timeout: Any) -> bool:
        """Hand the baton over; wait for the collective when it is back."""
        if self._is_over:
            return bool(self._work.wait(*timeout))
        self._hand_over()
        return self.finish(*timeout)

    def finish(self, *timeout: Any) -> bool:
        """Wait for the collective, without a hand-over."""
        self._is_over = True
        done = bool(self._work.wait(*timeout))
        self._end()
        return done
