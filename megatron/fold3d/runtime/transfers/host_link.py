"""``--lazy-inter-segment``: transfers between two segments, from host to host (paper Sec. IV).

The last rank's outputs wait on rank 0 until all forwards of rank 0's current segment are done. This
can be m - p + 1 tensors, which would fill a GPU. Here they wait in host memory and are copied to
the device when they are used. Gradients take the same route in the other direction.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import Action, Op, Program
from megatron.fold3d.plan.ops import BACK, COMPUTE_OPS, FORTH, RECV_OPS, WAYS
from megatron.fold3d.runtime.device import make_current
from megatron.fold3d.runtime.grad_sync.bucket_groups import timeout_of
from megatron.fold3d.runtime.offload.copies import Copies
from megatron.fold3d.runtime.offload.pinned_pool import PinnedPool, aligned
from megatron.fold3d.runtime.transfers.p2p import P2P, groups_by_op

_UNFINISHED_SENDS = 4  # a tensor more would wait; the verified plan runs with none unfinished
_READ = {way.compute: way.receive for way in WAYS}
_AT_THE_END = frozenset({FORTH.send, BACK.receive, BACK.compute})  # of a stage; others: its begin
_Fetched = tuple[torch.Tensor, torch.Tensor, Future[Any]]  # slot, device tensor, its copy's event
_COPIES = 2  # slots whose copy to the device may not be over yet


class HostLink(P2P):
    """One end of the link from the last rank of a pipeline to its first, over gloo.

    A separate thread waits for copies to the host and then sends. The calling thread must not wait:
    it runs ahead of the GPU, and the work that it would wait for may depend on sends that it has
    not issued yet. Another thread waits for the tensor that is used next and copies it to the
    device during the computation before. So the device holds one tensor more than compute uses.
    Only the sending thread sends, and only the calling thread receives.
    """

    def __init__(self, pp_group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(pp_group, device)
        self._num_ranks = pp_group.size()
        self.pool = PinnedPool(device)
        self._copies = Copies(device)
        # By receive: the slot, the tensor in it, and the work.
        self._posted: dict[Action, tuple[torch.Tensor, torch.Tensor, dist.Work]] = {}
        self._sends: deque[tuple[Future[None], torch.Tensor]] = deque()  # with their slots
        # Events of copies, with the tensor that is kept for each, or the slot that is free then.
        self._copying: deque[tuple[Any, torch.Tensor | None, torch.Tensor | None]] = deque()
        self._sender = _Worker(device)
        self._fetcher = _Worker(device)
        self._next: dict[Action, Action] = {}  # what is used next, of what is received
        self._fetched: dict[Action, _Fetched] = {}

    def begin_iteration(self, program: Program, num_bytes: int) -> None:
        """Reserve the host memory for an iteration whose tensors have ``num_bytes`` each.

        Raises:
            HostMemoryError: the host has less.
        """
        ours = [a for a in program if self.carries(a)]
        used = [
            Action(stage, _READ[op], microbatch) for stage, op, microbatch in ours if op in _READ
        ]
        self._next = dict(pairwise(used))
        waiting = most_waiting(ours)
        self.pool.reserve({aligned(num_bytes): waiting + _COPIES + _UNFINISHED_SENDS})

    def carries(self, action: Action) -> bool:
        """Return True if a transfer is between two segments: from last rank to first, or back.

        For a computation, return True if this link carries its input.
        """
        stage, op, _ = action
        return (stage + (op in _AT_THE_END)) % self._num_ranks == 0

    def post(self, action: Action, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Start to receive into host memory, as `P2P.post` says."""
        self._recycle()
        slot, tensor = self._stage(shape, dtype)
        self._posted[action] = slot, tensor, self._start_receive(action, tensor)

    def take(self, action: Action) -> torch.Tensor:
        """Return a received tensor, as `P2P.take` says.

        The host waits for the receive; the current stream waits for the copy to the device.
        """
        if action not in self._fetched:
            self._fetched[action] = self._fetch(action)
        slot, tensor, copy = self._fetched.pop(action)
        copied = copy.result(self._timeout_s())
        self._copies.wait(copied)
        self._copying.append((copied, None, slot))
        following = self._next.get(action)
        if following in self._posted:
            self._fetched[following] = self._fetch(following)
        return tensor

    def send(self, action: Action, tensor: torch.Tensor) -> None:
        """Start to send ``tensor``, as `P2P.send` says; it may be non-contiguous."""
        self._recycle()
        while len(self._sends) >= _UNFINISHED_SENDS:
            self._finish_first()
        slot, staged = self._stage(tensor.shape, tensor.dtype)
        source = tensor.detach().contiguous()  # a batch of copies moves bytes as they lie
        copied = self._copies.to_host([staged], [source])
        self._copying.append((copied, source, None))

        def deliver() -> None:
            copied.synchronize()
            self._start_send(action, staged).wait()

        self._sends.append((self._sender.submit(deliver), slot))

    def drain(self) -> None:
        """Wait until every send has left; every receive must have been taken."""
        left = [*self._posted, *self._fetched]
        assert not left, f"never used: {', '.join(map(str, left))}"
        while self._sends:
            self._finish_first()
        self._recycle()

    def _connect(self, pp_group: dist.ProcessGroup) -> dict[Op, Any]:
        return groups_by_op(pp_group, "gloo")

    def _timeout_s(self) -> float:
        return timeout_of(self._groups[FORTH.send]).total_seconds()

    def _fetch(self, action: Action) -> _Fetched:
        """Start to copy a tensor to the device as soon as it has been received."""
        slot, staged, work = self._posted.pop(action)
        tensor = torch.empty_like(staged, device=self._device)
        ready = self._copies.now()  # its memory is free from here on

        def copy() -> Any:
            work.wait()
            return self._copies.to_device([tensor], [staged], ready=ready)

        return slot, tensor, self._fetcher.submit(copy)

    def _stage(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a slot of host memory, and the tensor in it."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        while (slot := self.pool.take(num_bytes)) is None:  # the host is far ahead of the device
            self._copying[0][0].synchronize()
            self._recycle()
        return slot, slot[:num_bytes].view(dtype).view(tuple(shape))

    def _finish_first(self) -> None:
        future, slot = self._sends.popleft()
        future.result(self._timeout_s())
        self.pool.give_back(slot)

    def _recycle(self) -> None:
        """Release the tensors and slots of copies that are done."""
        while self._copying and self._copying[0][0].query():
            _, _, slot = self._copying.popleft()
            if slot is not None:
                self.pool.give_back(slot)


class _Worker:
    """A daemon thread that runs calls one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]
        self._calls = queue.SimpleQueue()
        self._device = device
        threading.Thread(target=self._run, name="fold3d host link", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue a call; the future has its result or exception."""
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def _run(self) -> None:
        make_current(self._device)
        while True:
            call, future = self._calls.get()
            try:
                result = call()
            except Exception as error:  # noqa: BLE001  (raised where the result is asked for)
                future.set_exception(error)
            else:
                future.set_result(result)


def most_waiting(actions: Sequence[Action]) -> int:
    """Return the largest number of receives that are posted and not used yet."""
    posted: set[tuple[int, bool, int | None]] = set()
    most = 0
    for stage, op, microbatch in actions:
        if op in RECV_OPS:
            posted.add((stage, op is FORTH.receive, microbatch))
            most = max(most, len(posted))
        elif op in COMPUTE_OPS:
            posted.discard((stage, op is FORTH.compute, microbatch))
    return most
