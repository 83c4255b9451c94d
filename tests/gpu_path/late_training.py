"""Training on one rank with late process groups and, unless told otherwise, a late device."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron.fold3d.config import bucket_flags, read_config
from megatron.fold3d.runtime import device as fold3d_device
from megatron.fold3d.runtime.executor import Executor
from megatron.fold3d.runtime.grad_sync import delta_code
from megatron.fold3d.runtime.offload import copies, host_memory, host_slots
from megatron.fold3d.runtime.offload.pinned_pool import PinnedPool
from megatron.fold3d.runtime.tensor_parallel.baton import Baton
from megatron.fold3d.runtime.transfers import host_link
from tests.end_to_end.training import Record, train
from tests.gpu_path.happens_before import caller
from tests.gpu_path.late_device import LAUNCHES, Delays, Future, LateDevice
from tests.gpu_path.late_groups import LateGroup
from tests.gpu_path.late_memory import as_array
from tests.gpu_path.late_streams import streams_for_cpp
from tests.gpu_path.mutations import Mutation, mutate
from tests.gpu_path.queued_operators import QueuedOperators


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """What is late.

    Attributes:
        delays: of all that a stream runs; every rank has a seed of its own.
        num_queues: hardware queues of the device.
        keeps_tensors: whether process groups keep the caller's tensors, as NCCL's do; see
            `late_groups`.
        launches: that a hardware queue holds before the host stops.
    """

    delays: Delays = field(default_factory=Delays)
    num_queues: int = 64
    keeps_tensors: bool = False
    launches: int = LAUNCHES


def train_late(argv: Sequence[str], late: Late, mutation: Mutation | None = None) -> Record:
    """Train as `train` does, on a late device and over late groups."""
    with mutate(mutation) if mutation else nullcontext(), lateness(late):
        return train(argv)


@contextmanager
def lateness(late: Late) -> Iterator[LateDevice]:
    """Make this rank's device and process groups late."""
    rank = int(torch.os.environ.get("RANK", "0"))
    delays = replace(late.delays, seed=late.delays.seed * 64 + rank)
    device = LateDevice(delays, late.num_queues, late.launches)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as undo:
        _make_groups_late(patch, device, late)
        patch.setitem(fold3d_device.STREAMS, "cpu", device)
        patch.setattr(copies, "batched_copy", device.copy)
        patch.setattr(delta_code, "_call", _queued_kernels(device))
        patch.setattr(host_link, "PinnedPool", partial(_LinkPool, device))
        patch.setattr(host_slots, "PinnedPool", partial(_OffloadPool, device))
        patch.setattr(host_memory, "take", _page_locking(device))
        _queue_operators(patch, device)
        _empty_storages(patch, device)
        record = device.memory.record_stream
        patch.setattr(torch.Tensor, "record_stream", lambda self, stream: record(self, stream))
        _collect_futures(patch)
        undo.enter_context(streams_for_cpp(device))
        if late.num_queues == 1:  # as with CUDA_DEVICE_MAX_CONNECTIONS=1
            for module in (bucket_flags, read_config):
                patch.setattr(module, "has_one_queue", lambda _: True)
        yield device
        device.check()


def _make_groups_late(patch: pytest.MonkeyPatch, device: LateDevice, late: Late) -> None:
    make, connect = c10d._new_process_group_helper, host_link.HostLink._connect
    for_host = []

    def make_late(*args: Any, **kwargs: Any) -> Any:
        group, *more = make(*args, **kwargs)
        if not isinstance(group, dist.ProcessGroup):  # this rank is not in it
            return group, *more
        on_host = bool(for_host)
        return LateGroup(group, device, on_host=on_host, keeps=late.keeps_tensors), *more

    def host_link_late(*args: Any) -> Any:
        for_host.append(True)
        try:
            return connect(*args)
        finally:
            for_host.pop()

    one_by_one = dist.batch_isend_irecv

    def at_once(ops: list[dist.P2POp]) -> list[dist.Work]:
        group = ops[0].group
        return [group.batch(ops)] if isinstance(group, LateGroup) else one_by_one(ops)

    patch.setattr(dist, "batch_isend_irecv", at_once)
    patch.setattr(c10d, "_new_process_group_helper", make_late)
    patch.setattr(host_link.HostLink, "_connect", host_link_late)


def _queued_kernels(device: LateDevice) -> Callable[..., None]:
    """Return what calls a code's kernels: they are launched on the current stream, if it runs late.

    Each of them reads its tensors, and writes the last one.
    """
    call = delta_code._call

    def queued(name: str, *arguments: torch.Tensor | int) -> None:
        if device.runs_at_once:
            device.current_stream().finish()
            call(name, *arguments)
            return
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        found = [
            device.memory.borrow(value) if isinstance(value, torch.Tensor) else partial(int, value)
            for value in arguments
        ]
        device.queue_operator(
            lambda: call(name, *(find() for find in found)),
            name,
            reads=tensors,
            writes=tensors[-1:],
        )

    return queued


def _collect_futures(patch: pytest.MonkeyPatch) -> None:
    of_torch = torch.futures.collect_all

    def collect_all(futures: list[Any]) -> Any:
        ours = bool(futures) and isinstance(futures[0], Future)
        return Future.all_of(futures) if ours else of_torch(futures)

    patch.setattr(torch.futures, "collect_all", collect_all)


def _queue_operators(patch: pytest.MonkeyPatch, device: LateDevice) -> None:
    run_iteration, mode = Executor._run_iteration, QueuedOperators(device)
    run_pair = Baton.run

    def run_queued(self: Executor, *args: Any) -> None:
        with mode:
            run_iteration(self, *args)

    def run_both_queued(
        self: Baton, first: Callable[[], None], second: Callable[[], None], *device: Any
    ) -> None:
        def second_queued() -> None:
            with mode.in_another_thread():
                second()

        run_pair(self, first, second_queued, *device)

    patch.setattr(Executor, "_run_iteration", run_queued)
    patch.setattr(Baton, "run", run_both_queued)
    wait_for_reads(patch, device)
    _copy_objects(patch)


def _copy_objects(patch: pytest.MonkeyPatch) -> None:
    """Copy the bytes of an object that is sent, as to a GPU, into memory of its allocator."""
    make = c10d._object_to_tensor

    def copied(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        data, size = make(*args)
        return data.clone(), size

    patch.setattr(c10d, "_object_to_tensor", copied)


def wait_for_reads(patch: pytest.MonkeyPatch, device: LateDevice) -> None:
    """Let the host wait before it reads memory past torch's dispatcher, as a copy to it would.

    So Megatron's dispatcher of tokens to experts reads how many there are.
    """

    def waiting(read: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_read(*args: Any) -> Any:
            if threading.get_ident() in device.hosts:
                device.note_host_wait()
                device.current_stream().finish()
            return read(*args)

        return wait_and_read

    for name in ("numpy", "tolist"):
        patch.setattr(torch.Tensor, name, waiting(getattr(torch.Tensor, name)))


def _empty_storages(patch: pytest.MonkeyPatch, device: LateDevice) -> None:
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if size == 0 and device.memory.empty_storage(self.data_ptr()):
            return self
        if device.memory.resize_storage(self, size):
            return self
        return resize(self, size)

    patch.setattr(torch.UntypedStorage, "resize_", resize_)


def _page_locking(device: LateDevice) -> Callable[..., torch.Tensor]:
    """Return `take` as it is on a GPU, where page-locking may wait for the device.

    The CUDA programming guide lists it under "Implicit Synchronization".
    """
    take = host_memory.take

    def take_and_note(*args: Any) -> torch.Tensor:
        device.note_host_wait()
        return take(*args)

    return take_and_note


class _OffloadPool(PinnedPool):
    """Host memory that copies alone read and write: free from this moment of the compute stream."""

    def __init__(self, late_device: LateDevice, device: torch.device) -> None:
        super().__init__(device)
        self._late_device = late_device

    def give_back(self, slot: torch.Tensor) -> None:
        what = f"host memory given back{caller()}"
        self._late_device.queue_operator(partial(_poison, slot), what, writes=(slot,))
        super().give_back(slot)


class _LinkPool(PinnedPool):
    """Host memory that the network reads and writes: NaN for as long as it is free."""

    def __init__(self, late_device: LateDevice, device: torch.device) -> None:
        super().__init__(device)
        self._late_device = late_device
        self._lock = threading.RLock()
        if late_device.delays.always is not None:
            threading.Thread(target=self._poison_free, daemon=True).start()

    def take(self, num_bytes: int) -> torch.Tensor:
        with self._lock:
            return super().take(num_bytes)

    def give_back(self, slot: torch.Tensor) -> None:
        with self._lock:
            self._late_device.host_writes(slot, f"given back{caller()}")
            _poison(slot)
            super().give_back(slot)

    def _poison_free(self) -> None:
        while True:
            with self._lock:
                for free in self._free.values():
                    for slot in free:
                        _poison(slot)
            time.sleep(0.001)


def _poison(slot: torch.Tensor) -> None:
    as_array(slot).fill(0xFF)
