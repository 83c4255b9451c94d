"""The tensors that autograd saves in one forward, in a form that can be offloaded and reloaded.

Autograd passes each tensor that it saves to a pack hook and gets it back from an unpack hook in the
backward. We keep the *storages* of these tensors, each once: a storage is a tensor's memory, and
views share it. The backward gets tensors of the same bytes, shape and strides.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from megatron.fold3d.runtime.offload.pinned_pool import ALIGNMENT, aligned


class SavedTensors:
    """The saved tensors of one micro-batch's forward of one stage.

    Args:
        device: the compute device; tensors elsewhere stay where they are.
        smallest_bytes: tensors whose storage is smaller stay on the device.
        lasting: addresses of storages that outlive the iteration; their tensors stay as well.

    Attributes:
        num_bytes: of the slot, from `flat` on.
        held: the stage's input, ``[seq, batch, hidden]``, which the schedule keeps only for its
            gradient; its storage is emptied, too. None in the first stage.
        slot: the host memory that they are copied to; ``buffer`` the memory they are copied back
            to. Both are ``uint8``; ``copied`` is the event of the latest copy.
    """

    def __init__(self, device: torch.device, smallest_bytes: int, lasting: frozenset[int]) -> None:
        self._device = device
        self._smallest_bytes = smallest_bytes
        self._lasting = lasting
        self._parts: dict[int, _Part] = {}  # by address, while all are on the device
        self._moved: list[_Part] = []
        self.num_bytes = 0
        self.held: torch.Tensor | None = None
        self.slot: torch.Tensor | None = None
        self.buffer: torch.Tensor | None = None
        self.copied: Any = None

    def hooks(self) -> AbstractContextManager[Any]:
        """Return a context in which all tensors that autograd saves are collected."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def flat(self) -> tuple[list[torch.Tensor], int]:
        """Return all storages that can be offloaded, and the bytes of their slot.

        Each is ``[num_bytes]`` of ``uint8`` and shares the storage's memory, which autograd owns
        until `leave`. Their `places` in the slot, which is never empty, are aligned, end to end.
        """
        self._moved, end = [part for part in self._parts.values() if part.is_whole], 0
        for part in self._moved:
            part.begin, end = end, end + aligned(part.num_bytes)
        flats = [part.flat for part in self._moved if part.flat is not None]
        self.num_bytes = max(end, ALIGNMENT)
        return flats, self.num_bytes

    def places(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a slot, ``[num_bytes]`` of ``uint8``: where each of `flat` belongs."""
        return [slot[part.begin : part.begin + part.num_bytes] for part in self._moved]

    def leave(self) -> None:
        """Drop the storages; they must have been copied, and compute must have waited for that."""
        if self.held is not None:
            storage = self.held.untyped_storage()
            part = self._parts.get(storage.data_ptr())
            if part is not None and part in self._moved:
                storage.resize_(0)
        for part in self._moved:
            part.flat = None
        self._parts.clear()

    def restore(self, buffer: torch.Tensor) -> None:
        """Let autograd unpack its tensors as views of ``buffer``.

        ``buffer`` is ``[num_bytes]`` of ``uint8`` on the device, with the bytes of `flat` at their
        `places`. It must be valid on the current stream, and belongs to autograd from now on.
        """
        for part, flat in zip(self._moved, self.places(buffer), strict=True):
            part.flat = flat

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _View":
        # A subclass, such as a parameter, is more than its storage.
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if (
            tensor.device.type != self._device.type
            or storage.nbytes() < self._smallest_bytes
            or address in self._lasting
        ):
            return tensor.detach()  # an output that its own node saves would never be freed
        part = self._parts.get(address)
        if part is None or not part.is_whole:  # an emptied storage's address is reused
            part = self._parts[address] = _Part(storage)
        return _View(part, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())


class _Part:
    """One storage, ``flat`` as ``[num_bytes]`` of ``uint8``; None while it is on the host."""

    __slots__ = ("begin", "flat", "num_bytes")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.flat: torch.Tensor | None
        self.flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.num_bytes = storage.nbytes()
        self.begin = 0  # in the slot

    @property
    def is_whole(self) -> bool:
        """True if its memory is there; Megatron empties storages that it will recompute."""
        return self.flat is not None and self.flat.untyped_storage().nbytes() == self.num_bytes


class _View(NamedTuple):
    """A saved tensor: its dtype, offset, shape and strides within its part."""

    part: _Part
    dtype: torch.dtype
    offset: int | torch.SymInt
    shape: torch.Size
    strides: tuple[int, ...]


def _unpack(saved: torch.Tensor | _View) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    if (flat := saved.part.flat) is None:
        raise RuntimeError("a backward needs activations that are on the host; RELOAD comes first")
    tensor = torch.empty(0, dtype=saved.dtype, device=flat.device)
    offset = flat.storage_offset() // tensor.itemsize + saved.offset
    return tensor.set_(flat.untyped_storage(), offset, saved.shape, saved.strides)
