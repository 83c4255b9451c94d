"""Transfers between pipeline neighbours: receives are posted early, and sends are asynchronous.

Keeps one invariant: the storage of a tensor that is being sent, or received into, stays alive
until its transfer is done, whatever the schedule does to the tensor meanwhile.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import Action, Op, Program
from megatron.fold3d.runtime.transfers import nccl

if TYPE_CHECKING:
    from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator
    from megatron.fold3d.runtime.transfers.host_link import HostLink

_UNFINISHED_SENDS = 16  # more than a plan ever leaves behind unless the receiver is far behind


class P2P:
    """Sends and receives of one pipeline rank.

    Forward and backward tensors use separate process groups: over NCCL, a receive that waits in one
    direction must not block a send in the other. In a pipeline of two ranks the ranks are
    neighbours on both sides, so each of the two links has its own groups as well.

    All ranks of the job construct a `P2P` together: the groups are made in one global order.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        device: torch.device,
        timeout: timedelta,
        *,
        lazy: bool = False,
        communicator: "PreemptiveCommunicator | None" = None,
        traffic_class: int | None = None,
    ) -> None:
        ranks = dist.get_process_group_ranks(pp_group)
        rank, num_ranks = pp_group.rank(), pp_group.size()
        self._device = device
        self._peers = {  # in the group
            Op.RECV_F: (rank - 1) % num_ranks,
            Op.SEND_F: (rank + 1) % num_ranks,
            Op.SEND_B: (rank - 1) % num_ranks,
            Op.RECV_B: (rank + 1) % num_ranks,
        }
        links = _make_groups(ranks, dist.get_backend(pp_group), timeout, traffic_class)
        before, after = links[(rank - 1) % num_ranks % len(links)], links[rank % len(links)]
        self._groups: dict[Op, Any] = {
            Op.RECV_F: before[0],
            Op.SEND_B: before[1],
            Op.SEND_F: after[0],
            Op.RECV_B: after[1],
        }
        self._arriving: dict[Action, tuple[torch.Tensor, dist.Work]] = {}
        self._leaving: deque[tuple[torch.Tensor, dist.Work]] = deque()
        self._meet(rank, num_ranks)
        self._host_link = _host_link(ranks, rank, device, timeout) if lazy else None

        self._announces = communicator is not None and device.type == "cpu"
        self._announced: dict[Action, float] = {}  # when
        self._computing_s: dict[tuple[int, Op], float] = {}  # from an announcement to its send
        if communicator is not None:
            backward = (Op.SEND_B, Op.RECV_B)
            self._groups = {
                op: communicator.group(group, direction=int(op in backward))
                for op, group in self._groups.items()
            }

    def begin(self, program: Program, num_bytes: int) -> None:
        """Prepare for an iteration whose transfers take ``num_bytes`` each.

        Raises:
            HostMemoryError: the host has less memory than tensors that wait there need.
        """
        if self._host_link is not None:
            self._host_link.begin(program, num_bytes)

    def post(self, action: Action, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Start the receive ``action`` (RECV_F or RECV_B) of one tensor; `take` waits for it."""
        if (link := self._host_link_of(action)) is not None:
            link.post(action, shape, dtype)
            return
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        peer, group = self._peers[action.op], self._groups[action.op]
        work = dist.irecv(tensor, group=group, group_src=peer)
        assert work is not None  # this rank is in the group
        self._arriving[action] = tensor, work

    def take(self, action: Action) -> torch.Tensor:
        """Return the tensor of a posted receive, on the device; the caller owns it.

        It is valid on the current stream, which waits for the receive. Over NCCL the host does not.
        """
        if (link := self._host_link_of(action)) is not None:
            return link.take(action)
        tensor, work = self._arriving.pop(action)
        work.wait()
        return tensor

    def announce(self, action: Action) -> None:
        """Announce that the computation of what ``action`` (SEND_F or SEND_B) will send begins.

        The previous micro-batch tells how long that takes. On a GPU nothing is announced: the host
        runs ahead of the device and does not know when it computes.
        """
        if not self._announces or self._host_link_of(action) is not None:
            return
        self._announced[action] = monotonic()
        if (eta_s := self._computing_s.get((action.stage, action.op))) is not None:
            self._groups[action.op].announce(self._peers[action.op], eta_s)

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send ``tensor``, on the device; the caller may reassign ``tensor.data`` at once.

        Its storage is kept alive until the send is done.
        """
        if (link := self._host_link_of(action)) is not None:
            link.send(action, tensor)
            return
        alias = tensor.detach()
        peer, group = self._peers[action.op], self._groups[action.op]
        work = dist.isend(alias, group=group, group_dst=peer)
        if (since := self._announced.pop(action, None)) is not None:
            self._computing_s[action.stage, action.op] = monotonic() - since
        assert work is not None
        self._leaving.append((alias, work))
        while self._leaving and (len(self._leaving) > _UNFINISHED_SENDS or self._first_has_left):
            self._leaving.popleft()[1].wait()

    def drain(self) -> None:
        """Wait until every send has left; every receive must have been taken."""
        assert not self._arriving, f"never used: {', '.join(map(str, self._arriving))}"
        while self._leaving:
            self._leaving.popleft()[1].wait()
        if self._host_link is not None:
            self._host_link.drain()

    def _host_link_of(self, action: Action) -> "HostLink | None":
        """Return the host link if it carries this transfer, else None."""
        link = self._host_link
        return link if link is not None and link.carries(action) else None

    @property
    def _first_has_left(self) -> bool:
        return self._leaving[0][1].is_completed()  # gloo never says so before it is waited for

    def _meet(self, rank: int, num_ranks: int) -> None:
        """Send one number over every link, one link after the other.

        NCCL connects two ranks at their first transfer and blocks both. Ranks that first contact
        their neighbours in different orders would deadlock.
        """
        token = torch.zeros(1, device=self._device)
        for link in range(num_ranks):  # from rank `link` to the next, and back
            if rank == link:
                self._pass(token, Op.SEND_F)
                self._pass(token, Op.RECV_B)
            if rank == (link + 1) % num_ranks:
                self._pass(token, Op.RECV_F)
                self._pass(token, Op.SEND_B)

    def _pass(self, token: torch.Tensor, op: Op) -> None:
        group, peer = self._groups[op], self._peers[op]
        if op in (Op.SEND_F, Op.SEND_B):
            dist.send(token, group=group, group_dst=peer)
        else:
            dist.recv(token, group=group, group_src=peer)


def _host_link(
    ranks: Sequence[int], rank: int, device: torch.device, timeout: timedelta
) -> "HostLink":
    """Make the host link from the pipeline's last rank to its first, with its process groups."""
    from megatron.fold3d.runtime.transfers.host_link import HostLink

    forward, backward = _make_groups(ranks, "gloo", timeout, None)[-1]
    last, first = len(ranks) - 1, 0
    groups = {Op.SEND_F: forward, Op.RECV_F: forward, Op.SEND_B: backward, Op.RECV_B: backward}
    peers = {Op.SEND_F: first, Op.RECV_F: last, Op.SEND_B: last, Op.RECV_B: first}
    return HostLink(groups, peers, device, timeout, len(ranks))


def _make_groups(
    ranks: Sequence[int], backend: str, timeout: timedelta, traffic_class: int | None
) -> list[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
    """Make the (forward, backward) groups of every pipeline, in the same order on all ranks.

    Returns:
        This pipeline's pairs; the link from rank r to the next uses pair ``r % len(pairs)``.
    """
    pipelines: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(pipelines, list(ranks))
    ours = []
    for pipeline in sorted({tuple(pipeline) for pipeline in pipelines}):
        for _ in range(2 if len(pipeline) == 2 else 1):
            forward, backward = (
                dist.new_group(
                    pipeline,
                    timeout=timeout,
                    backend=backend,
                    # PP.sync goes before DP.sync (paper Sec. III-A).
                    pg_options=nccl.options(
                        backend, timeout, traffic_class=traffic_class, first=True
                    ),
                )
                for _ in range(2)
            )
            if list(pipeline) == list(ranks):
                ours.append((forward, backward))
    return ours
