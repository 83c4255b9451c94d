"""A process group with torch's usual interface, whose communication a scheduler starts.

Keeps one invariant: the size of a tensor alone decides how it is cut, so every rank makes the same
slices, and they start in the order of the calls.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.fold3d.upstream.versions import with_collectives

if TYPE_CHECKING:
    from megatron.fold3d.runtime.preemption._scheduler import Scheduler, Waiter

_lanes = count()


@with_collectives
class PreemptiveGroup(dist.ProcessGroup):
    """The ranks of ``group``, with transfers that preempt collectives between their slices.

    It implements only the methods that Megatron's buckets and our pipeline call: ``allreduce``,
    ``reduce_scatter_single`` and ``all_gather_single`` (each also coalesced), ``send`` and
    ``recv``. ``direction`` distinguishes two groups whose transfers connect the same two ranks.
    ``scheduled`` is the group that does the work.

    Tensors are the caller's: contiguous, of any dtype, and complete on the stream that is current
    at the call, after which nothing may write them. Each method returns a task that acts as
    `dist.Work`. Results are valid on the stream that is current in its ``wait``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        scheduler: "Scheduler",
        waiters: "tuple[Waiter, Waiter]",
        slice_bytes: int,
        direction: int = 0,
    ) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # an overload
        self.scheduled = group
        self._ranks = dist.get_process_group_ranks(group)
        self._scheduler = scheduler
        self._senders, self._receivers = waiters
        self._slice_bytes = slice_bytes
        self._direction = direction
        self._lane = next(_lanes)
        self._names = count(1)
        # torch's own functions look a group up by its object, above all when they report an error.
        known = dist.distributed_c10d._world
        known.pg_map[self] = known.pg_map[group]
        known.pg_group_ranks[self] = known.pg_group_ranks[group]

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[torch.Tensor], options: Any = None
    ) -> Any:
        """Start an in-place all-reduce, slice by slice, of tensors of any shape, as one task."""
        slices = [part for tensor in tensors for part in self._slices(tensor)]
        start = self._scheduler.all_reduce
        return self._start(start, "all-reduce", slices, _op(options))

    allreduce_coalesced = allreduce  # type: ignore[assignment]

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, options: Any = None
    ) -> Any:
        """Start to reduce-scatter ``whole``; ``output`` gets this rank's shard of the result.

        ``output`` is ``[n]``, and ``whole`` ``[size * n]`` with the shards in the order of ranks.
        """
        return self.reduce_scatter_single_coalesced([output], [whole], options)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], options: Any = None
    ) -> Any:
        """Start to reduce-scatter several tensors as one task; pairs of `reduce_scatter_single`."""
        slices, start = self._sharded_slices(outputs, wholes), self._scheduler.reduce_scatter
        return self._start(start, "reduce-scatter", slices, _op(options))

    def all_gather_single(
        self, whole: torch.Tensor, share: torch.Tensor, options: Any = None
    ) -> Any:
        """Start to all-gather every rank's ``share``, ``[n]``, into ``whole``, ``[size * n]``."""
        return self.all_gather_single_coalesced([whole], [share], options)

    def all_gather_single_coalesced(
        self, wholes: Sequence[torch.Tensor], shares: Sequence[torch.Tensor], _options: Any = None
    ) -> Any:
        """Start to all-gather several tensors as one task; pairs of `all_gather_single`."""
        slices = self._sharded_slices(shares, wholes)
        return self._start(self._scheduler.all_gather, "all-gather", slices)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> Any:
        """Start to send one tensor, of any shape, to ``peer``, a rank of the group."""
        [tensor] = tensors
        to = self._ranks[peer]
        name = f"send to rank {to}"
        return self._scheduler.send(
            self.scheduled, tensor, self._senders, peer, tag, to, self._direction, name
        )

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> Any:
        """Start to receive one tensor, of the sent shape, from ``peer``, a rank of the group."""
        [tensor] = tensors
        of = self._ranks[peer]
        name = f"receive from rank {of}"
        return self._scheduler.receive(
            self.scheduled, tensor, self._receivers, peer, tag, of, self._direction, name
        )

    def announce(self, peer: int, eta_s: float) -> None:
        """Announce a send to ``peer`` in ``eta_s`` seconds, so that DP.sync pauses for it."""
        self._scheduler.announce(self._ranks[peer], self._direction, eta_s)

    def _get_backend(self, device: torch.device) -> Any:
        """Return the backend of ``scheduled``, whose options another group may take over."""
        return self.scheduled._get_backend(device)

    def _start(self, start: Callable[..., Any], what: str, slices: Any, *op: Any) -> Any:
        name = f"{what} {next(self._names)} over ranks {self._ranks}"
        return start(self.scheduled, slices, self._senders, *op, self._lane, name)

    def _slices(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flat = tensor.view(-1)
        return tuple(flat.split(max(1, self._slice_bytes // flat.element_size())))

    def _sharded_slices(
        self, shares: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Cut every rank's shard of a tensor at the same offsets.

        Each slice pairs a piece of our shard with that piece of every rank's shard in the whole
        tensor. So each element is reduced with the same others as without slices. ``slice_bytes``
        is for an all-reduce, which sends twice the bytes of a reduce-scatter or all-gather; hence
        the factor 2.
        """
        slices = []
        for share, whole in zip(shares, wholes, strict=True):
            size = max(1, 2 * self._slice_bytes // whole.element_size() // self.size())
            cut = [part.split(size) for part in whole.view(-1).chunk(self.size())]
            ours = share.view(-1).split(size)
            slices += [(part, list(parts)) for part, *parts in zip(ours, *cut, strict=True)]
        return slices


def _op(options: Any) -> Any:
    return options.reduceOp if options is not None else dist.ReduceOp.SUM
