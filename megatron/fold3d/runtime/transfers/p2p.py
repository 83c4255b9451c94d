"""Transfers between pipeline neighbours: receives are posted early, and sends are asynchronous.

Keeps one invariant: the storage of a tensor stays alive until its transfer is done, even if the
schedule frees or reassigns the tensor meanwhile.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import Action, Op, Program
from megatron.fold3d.plan.ops import BACK, FORTH, PEER, SEND_OPS, WAYS
from megatron.fold3d.runtime.grad_sync.bucket_groups import make_groups, ranks_of

_UNFINISHED_SENDS = 16  # a plan has fewer in flight unless the receiver is far behind


class P2P:
    """Transfers over the process groups of the pipeline.

    Forward and backward tensors use separate process groups: over NCCL, a receive that waits in one
    direction must not block a send in the other. In a pipeline of two ranks, the ranks are
    neighbours on both sides, so each of these two links has separate groups as well.

    All ranks of the job construct a `P2P` together: the groups are made in one global order.

    A received tensor is contiguous, ``[seq, batch, hidden]`` with seq split by context and sequence
    parallelism, and in the configuration's ``pipeline_dtype``.
    """

    def __init__(self, pp_group: dist.ProcessGroup, device: torch.device) -> None:
        _refuse_bound_group()
        rank, num_ranks = pp_group.rank(), pp_group.size()
        self._device = device
        self._peers = {op: (rank + step) % num_ranks for op, step in PEER.items()}  # in the group
        self._groups = self._connect(pp_group)
        self._arriving: dict[Action, tuple[torch.Tensor, dist.Work]] = {}
        self._leaving: deque[tuple[torch.Tensor, dist.Work]] = deque()

    def carries(self, action: Action) -> bool:
        """Return True: every transfer can take these links."""
        return True

    def begin_iteration(self, program: Program, num_bytes: int) -> None:
        """Do nothing: receives allocate their tensors, of ``num_bytes``, when they are posted."""

    def post(self, action: Action, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Start the receive ``action`` (RECV_F or RECV_B) of one tensor; `take` waits for it."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._arriving[action] = tensor, self._start_receive(action, tensor)

    def take(self, action: Action) -> torch.Tensor:
        """Return the tensor of a posted receive, on the device; the caller owns it.

        The tensor has the shape and dtype given to `post`. It is valid on the current stream, which
        waits for the receive. Over NCCL the host does not wait.
        """
        tensor, work = self._arriving.pop(action)
        work.wait()
        return tensor

    def announce(self, action: Action) -> None:
        """Do nothing when the computation before a send begins: DP.sync is not preempted."""

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send ``tensor``, on the device; the caller may reassign ``tensor.data`` at once.

        The tensor must be valid on the current stream. Its storage stays alive until the send is
        done.
        """
        alias = tensor.detach()
        work = self._start_send(action, alias)
        self._leaving.append((alias, work))
        while self._leaving and (
            len(self._leaving) > _UNFINISHED_SENDS
            or self._leaving[0][1].is_completed()  # with gloo False until somebody waits
        ):
            self._leaving[0][1].wait()  # keeps the tensor alive until then
            self._leaving.popleft()

    def drain(self) -> None:
        """Wait until every send has left; every receive must have been taken."""
        assert not self._arriving, f"never used: {', '.join(map(str, self._arriving))}"
        while self._leaving:
            self._leaving[0][1].wait()
            self._leaving.popleft()

    def _group(self, action: Action) -> Any:
        return self._groups[action.op]

    def _start_receive(self, action: Action, tensor: torch.Tensor) -> dist.Work:
        group, peer = self._group(action), self._peers[action.op]
        work = dist.irecv(tensor, group=group, group_src=peer)
        assert work is not None  # this rank is in the group
        return work

    def _start_send(self, action: Action, tensor: torch.Tensor) -> dist.Work:
        group, peer = self._group(action), self._peers[action.op]
        work = dist.isend(tensor, group=group, group_dst=peer)
        assert work is not None
        return work

    def _connect(self, pp_group: dist.ProcessGroup) -> dict[Op, Any]:
        """Make the groups of this rank's transfers, and connect their ranks; all ranks call it."""
        groups = groups_by_op(pp_group, dist.get_backend(pp_group))
        self._meet(groups, pp_group.rank(), pp_group.size())
        return groups

    def _meet(self, groups: Mapping[Op, dist.ProcessGroup], rank: int, num_ranks: int) -> None:
        """Send one number over every link, one link after the other.

        NCCL connects two ranks at their first transfer and blocks both. Ranks that first contact
        their neighbours in different orders would deadlock.
        """
        token = torch.zeros(1, device=self._device)

        def exchange(op: Op) -> None:
            if op in SEND_OPS:
                dist.send(token, group=groups[op], group_dst=self._peers[op])
            else:
                dist.recv(token, group=groups[op], group_src=self._peers[op])

        for link in range(num_ranks):  # from rank `link` to the next, and back
            if rank == link:
                exchange(FORTH.send)
                exchange(BACK.receive)
            if rank == (link + 1) % num_ranks:
                exchange(FORTH.receive)
                exchange(BACK.send)


def _refuse_bound_group() -> None:
    """Refuse a default group that is bound to a device.

    NCCL then makes one communicator per group instead of one per pair of ranks. A receive that is
    posted early would block a send on the same stream, and the sender of the received tensor may
    wait for that send.
    """
    if (device := dist.GroupMember.WORLD and dist.GroupMember.WORLD.bound_device_id) is not None:
        raise ValueError(
            f"init_process_group(device_id={device}): groups of a bound default group run all "
            "transfers in one stream, and a plan can deadlock there; drop device_id"
        )


def groups_by_op(pp_group: dist.ProcessGroup, backend: str) -> dict[Op, dist.ProcessGroup]:
    """Make the process groups of all pipelines together; return this rank's, by transfer op."""
    rank, num_ranks, ours = pp_group.rank(), pp_group.size(), ranks_of(pp_group)
    links = [  # the link from rank r to the next has index r % len(links)
        # PP.sync goes before DP.sync (paper Sec. III-A).
        [make_groups([pp_group], backend, first=True)[ours] for _ in WAYS]
        for _ in range(2 if num_ranks == 2 else 1)
    ]
    before, after = links[(rank - 1) % num_ranks % len(links)], links[rank % len(links)]
    return {
        FORTH.receive: before[0],
        BACK.send: before[1],
        FORTH.send: after[0],
        BACK.receive: after[1],
    }
