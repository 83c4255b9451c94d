"""Process groups that are as late as NCCL's may be, on top of gloo's.

A communicator is a stream of the `LateDevice`: what is launched on it waits for the computation
launched before, and reads its buffers when it starts. Results are in buffers of its own until
somebody waits for the work; only then they are written, on the stream that waits. A receive's
buffer holds NaN until then.

The rules of ``ProcessGroupNCCL.cpp`` (torch 2.7 to 2.13):

- Work waits for the current stream (``syncStream``), and a synchronous collective runs on it
  (``collective``: ``asyncOp ? ncclStreams_.at(key) : getCurrentCUDAStream``).
- A communicator runs its collectives in the order of their launch, whatever their streams are
  (NCCL's ``enqueue.cc``: ``ncclLaunchPrepare``, "depends on all of {deviceStream, ...}").
- A communicator's stream comes from torch's pool (``initNCCLComm``: ``getStreamFromPool``).
- A list of tensors goes through memory of the current stream (``newLikeFlat``). The work keeps it
  until somebody waits for it (``synchronizeStream``: ``unstash``), or until it is over and the
  group is called again (``workEnqueue``: ``shelvesToUnstash_``). It keeps the caller's tensors of
  a collective equally long, and those of a transfer are recorded on the communicator's stream
  (``pointToPoint``: ``recordStream``). No interface promises either: without ``keeps`` a group
  does neither, which shows a tensor that is not kept by us.
- A work's future is done at the launch; see `Future`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.gpu_path.late_device import LAUNCHES, Future, HardwareQueue, Item, LateDevice, Stream

_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter"),
    *("allgather", "all_gather_single", "all_gather_single_coalesced", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "_allgather_base"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "_reduce_scatter_base"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
_TRANSFERS = ("send", "recv", "batch")
_LISTS = ("reduce_scatter", "allgather")
# Of these the first argument is read; of the others the first is written, and those behind it read.
_IN_PLACE = ("send", "allreduce", "allreduce_coalesced", "broadcast", "reduce")


class LateWork(dist.Work):
    """One launched operation; ``deliver`` writes its results, ``kept`` are tensors until a wait."""

    def __init__(
        self,
        device: LateDevice,
        item: Item,
        deliver: Callable[[], None],
        kept: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._device, self._item, self._deliver = device, item, deliver
        self._delivered: Item | None = None
        self._kept = [*kept]

    def wait(self, timeout: Any = None) -> bool:
        device = self._device
        if threading.get_ident() not in device.hosts:  # the C++ scheduler's, which asks for the end
            device.host_waits(self._item)
            return True
        deliver, self._deliver = self._deliver, None
        is_first = deliver is not None
        if device.runs_ahead:
            after = [self._item] if is_first or self._delivered is None else [self._delivered]
            item = device.current_stream().launch(deliver, after, "wait")
            self._delivered = self._delivered or item
        else:
            device.note_host_wait()
            device.host_waits(self._item)
            if is_first:
                deliver()
        self._kept.clear()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if self._item.is_over:
            self._device.order.host_waited(self._item.clock)
        return self._item.is_over

    def is_success(self) -> bool:
        return self._item.is_over and self._item.error is None

    def get_future(self) -> Any:
        return Future(self._device, [self._item])

    def let_go_if_over(self) -> bool:
        if self._kept and self.is_completed():
            self._kept.clear()
        return not self._kept


class LateGroup(dist.ProcessGroup):
    """The ranks of ``group``, whose work is done late.

    ``on_host`` is for groups that carry host memory: waiting for them blocks the host. ``keeps`` is
    whether the group keeps the caller's tensors, as NCCL's does.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: LateDevice,
        *,
        on_host: bool = False,
        keeps: bool = False,
    ) -> None:
        super().__init__(group.rank(), group.size())
        self._group, self._late_device, self._on_host = group, device, on_host
        self._keeps, self._make_work = keeps, HostWork if on_host else LateWork
        self._unwaited: list[LateWork] = []
        self._collectives: Stream | None = None
        self._last_collective: Item | None = None
        self._links: dict[int, Stream] = {}
        world = c10d._world
        for known in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
            known[self] = known[group]
        self._set_group_name(group.group_name)

    def _get_backend(self, device: torch.device) -> Any:
        return self._group._get_backend(device)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        return self._launch(self._link(peer), "send", (list(tensors), peer, tag), writes=False)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        if threading.get_ident() in self._late_device.hosts:  # another cannot write in time
            with _disable_current_modes() if self._on_host else nullcontext():
                for tensor in tensors:
                    tensor.detach().fill_(torch.nan if tensor.is_floating_point() else -1)
        return self._launch(self._link(peer), "recv", (list(tensors), peer, tag))

    def batch(self, ops: Sequence[dist.P2POp]) -> dist.Work:
        """Launch sends and receives as one operation, as NCCL does if they are coalesced."""
        sends = [op for op in ops if op.op is dist.isend]
        receives = [op for op in ops if op.op is dist.irecv]
        for op in receives:
            op.tensor.detach().fill_(torch.nan if op.tensor.is_floating_point() else -1)

        def exchange(received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> None:
            started = [
                start([tensor], op.group_peer, op.tag)
                for start, ops, tensors in (
                    (self._group.send, sends, sent),
                    (self._group.recv, receives, received),
                )
                for op, tensor in zip(ops, tensors, strict=True)
            ]
            for work in started:
                work.wait()

        args = [op.tensor for op in receives], [op.tensor for op in sends]
        return self._collective("batch", args, exchange)

    def barrier(self, *args: Any, **kwargs: Any) -> dist.Work:
        return self._group.barrier(*args, **kwargs)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        self._group.monitored_barrier(*args, **kwargs)

    def getBackendName(self) -> str:  # noqa: N802
        return "gloo"

    def _link(self, peer: int) -> Stream:
        """Return the stream of the pair's communicator, as NCCL has one per pair."""
        if peer not in self._links:
            self._links[peer] = self._stream(f"link to {peer}")
        return self._links[peer]

    def _stream(self, name: str) -> Stream:
        device = self._late_device
        if self._on_host:  # gloo's threads: no hardware queue holds them up
            return Stream(device, name, HardwareQueue(device.starter, LAUNCHES))
        return device.from_pool(name)

    def _collective(
        self, name: str, args: Sequence[Any], call: Callable[..., Any] | None = None
    ) -> dist.Work:
        if self._collectives is None:
            self._collectives = self._stream("collectives")
        is_async = all(getattr(argument, "asyncOp", True) for argument in args)
        stream = self._collectives if is_async else self._late_device.current_stream()
        return self._launch(stream, name, args, call=call, is_collective=True)

    def _launch(
        self,
        stream: Stream,
        name: str,
        args: Sequence[Any],
        *,
        writes: bool = True,
        call: Callable[..., Any] | None = None,
        is_collective: bool = False,
    ) -> dist.Work:
        """Launch the method ``name`` of the group, or ``call``."""
        device = self._late_device
        targets = _tensors(args[0]) if writes else []
        lent = {id(tensor): device.memory.borrow(tensor) for tensor in _tensors(args)}
        order = [id(tensor) for tensor in targets]
        outputs = [lent[key] for key in order]
        shown = tree_map_only(torch.Tensor, lambda t: _Lent(lent[id(t)], id(t)), args)
        results: list[torch.Tensor] = []

        def run() -> None:
            if self._on_host and device.delays.always is not None:
                time.sleep(0.005)  # on the way to the network
            private: dict[int, torch.Tensor] = {}

            def read(part: _Lent) -> torch.Tensor:
                if part.key not in private:
                    private[part.key] = part.find().clone(memory_format=torch.contiguous_format)
                return private[part.key]

            work = (call or getattr(self._group, name))(*tree_map_only(_Lent, read, shown))
            if work is not None:
                work.wait()
            results.extend(private[key] for key in order)

        def deliver() -> None:
            for find, result in zip(outputs, results, strict=True):
                find().copy_(result)

        read = _tensors(args[0] if name in _IN_PLACE else args[1:])
        self._unwaited = [work for work in self._unwaited if not work.let_go_if_over()]
        flat = self._flattened(name, args)
        kept = [*flat]
        if self._keeps and name in _TRANSFERS:
            for tensor in (*read, *targets):
                device.memory.record_stream(tensor, stream)
        elif self._keeps:
            kept += [*read, *targets]
        after = device.current_stream()
        device.flush()
        waits = [after.last] if after.last and not self._on_host else []
        if is_collective and self._last_collective is not None:
            waits.append(self._last_collective)
        item = stream.launch(run, waits, name)
        if is_collective:
            self._last_collective = item
        device.communicates(stream, item, name)
        device.item_uses(stream, item, name, reads=read, writes=[*targets, *flat])
        work = self._make_work(device, item, deliver, kept)
        if kept:
            self._unwaited.append(work)
        return work

    def _flattened(self, name: str, args: Sequence[Any]) -> list[torch.Tensor]:
        """Return the memory through which lists of tensors go, of the current stream."""
        if name not in _LISTS or self._on_host:
            return []
        parts = _tensors(args[0] if name == "allgather" else args[1])
        with _disable_current_modes():
            shape = (sum(part.numel() for part in parts),)
            return [self._late_device.memory.take(shape, (1,), parts[0].dtype)]


class HostWork(LateWork):
    """A work of host memory: to wait is to block the host."""

    def wait(self, timeout: Any = None) -> bool:
        self._device.host_waits(self._item)
        if self._deliver is not None:
            self._deliver()
            self._deliver = None
        return True


@dataclass(frozen=True, slots=True)
class _Lent:
    find: Callable[[], torch.Tensor]
    key: int


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _method(name: str) -> Callable[..., dist.Work]:
    def method(self: LateGroup, *args: Any, **kwargs: Any) -> dist.Work:
        return self._collective(name, (*args, *kwargs.values()))

    return method


for _name in _COLLECTIVES:
    if hasattr(dist.ProcessGroup, _name):  # torch renamed some
        setattr(LateGroup, _name, _method(_name))
