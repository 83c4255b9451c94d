"""An allocator whose freed memory is reused at once, where CUDA's caching allocator might.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``:

- A block belongs to the stream that is current when it is allocated (``malloc``).
- When its last reference goes, the next allocation on that stream may get it (``free``,
  ``free_block``), whatever other streams still do with it. Here, that stream fills it with NaN, and
  the next allocation of its size on that stream gets it.
- After ``record_stream``, that is put off: ``free`` records an event on each recorded stream
  (``insert_events``), and an allocation after they have passed may get it (``process_events``).
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from tests.gpu_path.happens_before import Bytes, caller

if TYPE_CHECKING:
    from tests.gpu_path.late_device import Item, LateDevice, Stream

as_array = torch.Tensor.numpy  # before it is patched to wait
_ALIGNMENT = 64  # as torch's own allocator: kernels may depend on it


@dataclass(slots=True)
class _Block:
    """Memory and its owner; ``also`` are the streams that `Memory.record_stream` has named."""

    whole: np.ndarray
    owner: "Stream"
    also: "dict[Stream, None]" = field(default_factory=dict)

    @property
    def address(self) -> int:
        return int(self.whole.ctypes.data)


class Memory:
    """The memory of one device."""

    def __init__(self, device: "LateDevice") -> None:
        self._device = device
        self._alive: dict[int, _Block] = {}  # by address
        self._free: dict[tuple[Stream, int], list[np.ndarray]] = {}  # by owner and size
        self._waiting: list[tuple[_Block, list[Item], str]] = []  # freed, but recorded
        self._emptied: set[int] = set()  # addresses of storages of others

    def take(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor for the current stream, which finds it full of NaN (integers: of -1)."""
        last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        num_bytes = max(0 if 0 in shape else last, 1) * dtype.itemsize
        owner = self._device.current_stream()
        with self._device.launching:
            self._reuse_recorded()
            free = self._free.get((owner, num_bytes))
            whole = free.pop() if free else _new(num_bytes)
            block = _Block(whole, owner)
            self._alive[block.address] = block
            self._device.order.taken(block.address)
        handed = whole[:]
        weakref.finalize(handed, self._free_block, block.address).atexit = False
        storage = torch.from_numpy(handed).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(stride))

    def owns(self, address: int) -> bool:
        """Return True if memory at this address was taken here and is not free."""
        return address in self._alive

    def record_stream(self, tensor: torch.Tensor, stream: "Stream") -> None:
        """Do what ``tensor.record_stream`` does: put off reuse until this stream is done."""
        block = self._alive.get(tensor.untyped_storage().data_ptr())
        if block is not None and stream is not block.owner:
            block.also[stream] = None

    def empty_storage(self, address: int) -> bool:
        """Do what ``storage.resize_(0)`` does to memory of ours; False if it is not."""
        block = self._alive.get(address)
        if block is not None:
            self._poison(block.whole, block.owner, f"freed memory{caller()}")
        return block is not None

    def resize_storage(self, storage: torch.UntypedStorage, size: int) -> bool:
        """Do what ``storage.resize_`` does to memory of others; False if nothing is queued.

        Work that is queued may still use it, so it is not freed. It holds NaN until it is written
        again.
        """
        address = storage.data_ptr()
        if size == 0 and self._device.is_queued:
            whole = as_array(torch.empty(0, dtype=torch.uint8).set_(storage))
            self._emptied.add(address)
            self._poison(whole, self._device.compute, f"freed memory{caller()}")
            return True
        if address in self._emptied:
            self._emptied.remove(address)
            return True
        return False

    def borrow(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that finds the tensor's memory as it then is, without keeping it."""
        shape, stride = tuple(tensor.shape), tensor.stride()
        storage, offset, dtype = tensor.untyped_storage(), tensor.storage_offset(), tensor.dtype
        block = self._alive.get(storage.data_ptr())
        if block is not None:
            whole = block.whole

            def find_ours() -> torch.Tensor:
                kept = torch.from_numpy(whole).untyped_storage()
                return torch.empty(0, dtype=dtype).set_(kept, offset, shape, stride)

            return find_ours
        weak, num_bytes = storage._weak_ref(), storage.nbytes()

        def find() -> torch.Tensor:
            found = torch.UntypedStorage._new_with_weak_ptr(weak)
            if found is None or found.nbytes() < num_bytes:  # freed
                return torch.full(shape, -1 if not dtype.is_floating_point else torch.nan).to(dtype)
            return torch.empty(0, dtype=dtype).set_(found, offset, shape, stride)

        return find

    def lend(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that finds a tensor for an operator of the current stream.

        Memory of ours is not kept: an operator that is launched does not keep its tensors alive.
        Memory of others is, for nobody fills it with NaN in the order of its stream.
        """
        if self.owns(tensor.untyped_storage().data_ptr()):
            return self.borrow(tensor)
        kept = tensor.detach()
        return lambda: kept

    def _free_block(self, address: int) -> None:
        with self._device.launching:
            block = self._alive.pop(address)
            what = f"freed memory{caller()}"
            if block.also:
                self._device.flush()
            ends = [stream.last for stream in block.also if stream.last is not None]
            if ends:
                self._waiting.append((block, ends, what))
            else:
                self._give_back(block, what)

    def _reuse_recorded(self) -> None:
        still = []
        for block, ends, what in self._waiting:
            if all(item.is_over for item in ends):
                for item in ends:
                    self._device.order.host_waited(item.clock)
                self._give_back(block, what)
            else:
                still.append((block, ends, what))
        self._waiting = still

    def _give_back(self, block: _Block, what: str) -> None:
        self._poison(block.whole, block.owner, what)
        self._free.setdefault((block.owner, block.whole.nbytes), []).append(block.whole)

    def _poison(self, whole: np.ndarray, owner: "Stream", what: str) -> None:
        device = self._device
        if not device.is_queued and owner is device.compute:
            whole.fill(0xFF)
            return
        used = Bytes(whole.ctypes.data, 0, whole.nbytes)
        fill = functools.partial(whole.fill, 0xFF)
        device.queue_operator(fill, what, writes=(used,), stream=owner, stops=False)


def _new(num_bytes: int) -> np.ndarray:
    whole = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    skip = -whole.ctypes.data % _ALIGNMENT
    whole = whole[skip : skip + num_bytes]
    whole.fill(0xFF)
    return whole
