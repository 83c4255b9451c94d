"""Slots of pinned host memory, allocated once and reused in every iteration.

Memory is allocated in a few large pieces and cut into slots, before an iteration if its need is
known. Slots of one size are reused first in, first out, since AIAO offloads and reloads
micro-batches in that order.
"""

import logging
from collections import Counter, deque
from collections.abc import Mapping

import torch

from megatron.fold3d.runtime.offload import host_memory

logger = logging.getLogger(__name__)

ALIGNMENT = 512
"""Alignment in bytes, that of a device's own allocator, which kernels may rely on."""


class Slot:
    """A part of the pool; `memory` is ``[num_bytes]`` of ``uint8``, a view that the pool owns.

    The code that has taken the slot may write it once no copy reads or writes it any more.
    """

    __slots__ = ("memory",)

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class PinnedPool:
    """The host memory of one rank's offloaded activations.

    Attributes:
        num_bytes: the bytes allocated from the host so far.
        num_growths: the number of allocations.
        high_water_bytes: the most bytes that were in use at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = self.num_growths = self.high_water_bytes = 0
        self._device = device
        self._in_use_bytes = 0
        self._slots: Counter[int] = Counter()  # how many there are, by size
        self._free: dict[int, deque[Slot]] = {}

    def reserve(self, slots: Mapping[int, int], most_bytes: int | None = None) -> int:
        """Make sure that the pool has at least ``slots[size]`` slots of each size, in use or free.

        Args:
            slots: number of slots by size.
            most_bytes: the most to allocate for them; None is no limit.

        Returns:
            The number of slots that were not made because of ``most_bytes``.

        Raises:
            HostMemoryError: the host has less memory than the slots take.
        """
        new: dict[int, int] = {}
        left, num_lacking = most_bytes, 0
        for size, count in slots.items():
            lacking = max(0, count - self._slots[size])
            made = lacking if left is None else min(lacking, left // size)
            left = None if left is None else left - made * size
            num_lacking += lacking - made
            if made:
                new[size] = made
        if new:
            self._grow(new)
        return num_lacking

    def has_free(self, num_bytes: int) -> bool:
        """Return True if there is a free slot of that size, or a larger one."""
        return self._best(num_bytes) is not None

    def take(self, num_bytes: int) -> Slot:
        """Return the smallest free slot that fits; if there is none, grow the pool by one.

        Raises:
            HostMemoryError: the host has no memory left for it.
        """
        size = self._best(num_bytes)
        if size is None:
            size = aligned(num_bytes)
            logger.info("no slot of %s bytes is free: the pool of host memory grows", f"{size:,}")
            self._grow({size: 1})
        slot = self._free[size].popleft()
        self._in_use_bytes += size
        self.high_water_bytes = max(self.high_water_bytes, self._in_use_bytes)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Return a slot to the pool; nothing may read or write it any more."""
        size = slot.memory.numel()
        self._in_use_bytes -= size
        self._free[size].append(slot)

    def _best(self, num_bytes: int) -> int | None:
        fitting = (size for size, free in self._free.items() if free and size >= num_bytes)
        return min(fitting, default=None)

    def _grow(self, new: Mapping[int, int]) -> None:
        total = sum(size * count for size, count in new.items())
        piece = host_memory.take(total, self._device)
        self.num_bytes += total
        self.num_growths += 1
        sizes = [size for size, count in new.items() for _ in range(count)]
        for memory in piece.split(sizes):
            self._free.setdefault(memory.numel(), deque()).append(Slot(memory))
        self._slots.update(new)


def aligned(num_bytes: int) -> int:
    """Round up to `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
