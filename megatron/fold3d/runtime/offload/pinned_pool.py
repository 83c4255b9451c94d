"""Slots of pinned host memory, allocated once and reused in every iteration.

Keeps one invariant: only `reserve` and `reserve_bytes` allocate, and they are called between
iterations. Page-locking takes locks of the node and may wait for the device, so within an iteration
it could wait for another rank that waits for this one.

Memory is allocated in a few large pieces and cut into slots, on demand if their sizes were not
known. Slots of one size are reused first in, first out, since AIAO offloads and reloads
micro-batches in that order.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping

import torch

from megatron.fold3d.runtime.offload import host_memory

ALIGNMENT = 512
"""Alignment in bytes, that of a device's own allocator, which kernels may rely on."""


class PinnedPool:
    """The host memory of one rank's offloaded activations.

    Attributes:
        num_bytes: the bytes allocated from the host so far.
        high_water_bytes: the most bytes that were in use at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = self.num_growths = self.high_water_bytes = 0
        self._device = device
        self._in_use_bytes = 0
        self._slots: Counter[int] = Counter()  # how many there are, by size
        self._free: dict[int, deque[torch.Tensor]] = {}
        self._uncut = torch.empty(0, dtype=torch.uint8)

    def reserve_bytes(self, num_bytes: int) -> None:
        """Allocate memory for slots whose sizes are not known yet.

        Raises:
            HostMemoryError: the host has less.
        """
        self._uncut = self._allocate(aligned(num_bytes))

    def reserve(self, slots: Mapping[int, int], most_bytes: int | None = None) -> int:
        """Make sure that the pool has at least ``slots[size]`` slots of each size, in use or free.

        Args:
            most_bytes: the most to allocate for them; None is no limit.

        Returns:
            The number of slots that were not made because of ``most_bytes``.

        Raises:
            HostMemoryError: the host has less memory than the slots take.
        """
        left, num_lacking, new = most_bytes, 0, Counter[int]()
        for size, count in slots.items():
            lacking = max(0, count - self._slots[size])
            while lacking and self._cut(size):
                lacking -= 1
            made = lacking if left is None else min(lacking, left // size)
            left = None if left is None else left - made * size
            num_lacking += lacking - made
            new[size] = made
        if total := sum(size * count for size, count in new.items()):
            self._add(self._allocate(total).split(list(new.elements())))
        return num_lacking

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """Return the smallest free slot that fits, or a new one of uncut memory; None without.

        It is ``[num_bytes]`` of ``uint8`` or more, a view that the pool owns. Whoever has taken it
        may write it once no copy reads or writes it any more.
        """
        fitting = (size for size, free in self._free.items() if free and size >= num_bytes)
        size = min(fitting, default=None)
        if size is None:
            size = aligned(num_bytes)
            if not self._cut(size):
                return None
        slot = self._free[size].popleft()
        self._in_use_bytes += size
        self.high_water_bytes = max(self.high_water_bytes, self._in_use_bytes)
        return slot

    def give_back(self, slot: torch.Tensor) -> None:
        """Return a slot of `take` to the pool; nothing may read or write it any more."""
        size = slot.numel()
        self._in_use_bytes -= size
        self._free[size].append(slot)

    def _cut(self, size: int) -> bool:
        """Make a free slot of uncut memory; returns False if there is too little."""
        if self._uncut.numel() < size:
            return False
        slot, self._uncut = self._uncut[:size], self._uncut[size:]
        self._add([slot])
        return True

    def _add(self, slots: Iterable[torch.Tensor]) -> None:
        for slot in slots:
            self._free.setdefault(slot.numel(), deque()).append(slot)
            self._slots[slot.numel()] += 1

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        self.num_bytes += num_bytes
        self.num_growths += 1
        return host_memory.take(num_bytes, self._device)


def aligned(num_bytes: int) -> int:
    """Round up to `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
