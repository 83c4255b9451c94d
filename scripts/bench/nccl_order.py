"""Patch the collectives of ``torch.distributed.ProcessGroup``: gloo with NCCL's order and cost.

Why: gloo runs two collectives of one group at once, and lets them share the link; its
    reduce-scatter moves as many bytes as an all-reduce, and its all-gather and all-to-all between
    two ranks use the link in one direction at a time. A schedule that is tuned on that is tuned
    for a library that nobody trains with.
Change: the collectives of a group run one at a time, in order of issue, on one thread of the
    group, as NCCL's do on one stream of the communicator; reduce-scatter and all-gather are rings
    that move their true volume both ways at once, and so does an all-to-all. All groups and all
    callers, since every call ends in these methods. Sends and receives stay gloo's.
Remove when: the bench runs on NCCL.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fold3d_patches.registry import Patch, around

# In gloo these cost what they cost in NCCL: only their order changes.
_ORDERED = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "reduce_scatter",
    "alltoall",
    "barrier",
)
_RING_TAG = 77  # of the ring's messages, which no receive of Megatron's may take

Run = Callable[[], None]
Ring = Callable[[dist.ProcessGroup, torch.Tensor, torch.Tensor], None]


class OrderedWork(dist.Work):
    """A collective that waits for its turn, runs, and is done or has failed."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self._done = threading.Event()
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._error: BaseException | None = None

    def execute(self) -> None:
        """Run the collective; its error is for whoever waits."""
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  # raised by `wait`
            self._error = error
        finally:
            del self._run  # and with it the tensors
            self._done.set()
            self._future.set_result(None)

    def get_future(self) -> "torch.futures.Future[None]":
        """Return what is complete when the collective has ended, well or not."""
        return self._future

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._done.is_set() and self._error is None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the collective has ended; raise what it raised."""
        seconds = timeout.total_seconds() if timeout else None
        if not self._done.wait(seconds or None):  # zero is torch's word for no timeout
            raise RuntimeError(f"a collective did not end within {seconds} s")
        if self._error is not None:
            raise self._error
        return True


class OrderedQueue:
    """The thread of one process group; it ends with the process."""

    def __init__(self, name: str) -> None:
        self._works: queue.SimpleQueue[OrderedWork] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name=f"collectives of {name}", daemon=True).start()

    def submit(self, run: Run) -> OrderedWork:
        """Run after everything that was submitted before."""
        work = OrderedWork(run)
        self._works.put(work)
        return work

    def _loop(self) -> None:
        while True:
            self._works.get().execute()


def reduce_scatter(
    group: dist.ProcessGroup, output: torch.Tensor, contribution: torch.Tensor
) -> None:
    """Sum ``contribution`` over the group and leave this rank's share of the sum in ``output``.

    A ring: share r starts at rank r + 1 and reaches rank r last, a partial sum at each hop, so a
    rank sends ``(size - 1) / size`` of the bytes. ``output`` may be a part of ``contribution``,
    as Megatron's is.
    """
    rank, size = group.rank(), group.size()
    shares = contribution.reshape(-1).chunk(size)
    partial = shares[(rank - 1) % size]
    for hop in range(1, size):
        arriving = torch.empty_like(partial)
        _pass_on(group, partial, arriving)
        partial = arriving.add_(shares[(rank - 1 - hop) % size])
    output.copy_(partial.reshape(output.shape))


def all_gather(group: dist.ProcessGroup, output: torch.Tensor, share: torch.Tensor) -> None:
    """Collect every rank's ``share`` in ``output``; a ring like that of `reduce_scatter`."""
    rank, size = group.rank(), group.size()
    shares = output.view(-1).chunk(size)
    shares[rank].copy_(share.reshape(-1))
    for hop in range(size - 1):
        _pass_on(group, shares[(rank - hop) % size], shares[(rank - hop - 1) % size])


@torch.no_grad()  # not the caller's: this is another thread
def all_to_all(
    group: dist.ProcessGroup,
    received: torch.Tensor,
    sent: torch.Tensor,
    received_sizes: Sequence[int] = (),
    sent_sizes: Sequence[int] = (),
) -> None:
    """Send each rank its rows of ``sent``, and leave theirs in ``received``; no sizes: equal ones.

    A rank sends to the next while the one before sends to it, then to the one after that.
    """
    rank, size = group.rank(), group.size()
    theirs = received.split(list(received_sizes) or received.shape[0] // size)
    mine = sent.split(list(sent_sizes) or sent.shape[0] // size)
    theirs[rank].copy_(mine[rank])
    for hops in range(1, size):
        _pass_on(group, mine[(rank + hops) % size], theirs[(rank - hops) % size], hops)


def _pass_on(
    group: dist.ProcessGroup, leaving: torch.Tensor, arriving: torch.Tensor, hops: int = 1
) -> None:
    """Send to the rank that is ``hops`` ahead while receiving from the one as far behind."""
    rank, size = group.rank(), group.size()
    # The receive first: gloo announces it in-band, where it would queue behind the data sent.
    works = []
    if arriving.numel():
        works.append(group.recv([arriving], (rank - hops) % size, _RING_TAG))
    if leaving.numel():
        works.append(group.send([leaving], (rank + hops) % size, _RING_TAG))
    for work in works:
        work.wait()


_RINGS: dict[str, Ring] = {
    "reduce_scatter_single": reduce_scatter,
    "reduce_scatter_single_coalesced": reduce_scatter,
    "all_gather_single": all_gather,  # and coalesced ones, which `--device cpu` starts one by one
}


def patches() -> tuple[Patch, ...]:
    """All collectives of all groups of this process."""
    queues: dict[dist.ProcessGroup, OrderedQueue] = {}

    def submit(group: dist.ProcessGroup, run: Run) -> OrderedWork:
        if group not in queues:
            queues[group] = OrderedQueue(group.group_desc or group.group_name)
        return queues[group].submit(run)

    def ordered(
        upstream: Callable[..., Any], group: dist.ProcessGroup, *args: Any, **kwargs: Any
    ) -> OrderedWork:
        return submit(group, lambda: upstream(group, *args, **kwargs).wait())

    def both_ways(_: Callable[..., Any], group: dist.ProcessGroup, *args: Any) -> OrderedWork:
        *tensors_and_sizes, _options = args
        return submit(group, lambda: all_to_all(group, *tensors_and_sizes))

    def in_rings(
        ring: Ring,
        upstream: Callable[..., Any],
        group: dist.ProcessGroup,
        outputs: Any,  # a tensor, or a sequence of them if coalesced
        inputs: Any,
        options: Any,
    ) -> OrderedWork:
        if getattr(options, "reduceOp", dist.ReduceOp.SUM) != dist.ReduceOp.SUM:
            return ordered(upstream, group, outputs, inputs, options)
        single = isinstance(outputs, torch.Tensor)
        pairs = [(outputs, inputs)] if single else list(zip(outputs, inputs, strict=True))

        def run() -> None:
            for output, contribution in pairs:
                ring(group, output, contribution)

        return submit(group, run)

    target = "torch.distributed:ProcessGroup."
    return (
        *(around(target + name)(ordered) for name in _ORDERED),
        around(target + "all_to_all_single")(both_ways),
        *(around(target + name)(partial(in_rings, ring)) for name, ring in _RINGS.items()),
    )
