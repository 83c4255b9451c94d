"""The bytes that computations leave for later ones, also where a device does not count them.

Keeps one invariant: a tensor is unpacked as it was packed, so no result changes.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch

from megatron.fold3d.runtime.device import held_device_bytes
from megatron.fold3d.runtime.feature import Iteration


def lasting_storages(modules: Iterable[torch.nn.Module]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of parameters and buffers, which outlive an iteration."""
    for module in modules:
        # Megatron's DDP has other things under the name `buffers`.
        for tensor in chain(module.parameters(), torch.nn.Module.buffers(module)):
            yield tensor.untyped_storage()


class SavedBytes:
    """Counts the storages that autograd keeps; a storage with several saved views counts once.

    Args:
        modules: the modules whose parameters and buffers do not count.

    Attributes:
        now: the bytes held now, of the tensors that `hooks` has seen.
        peak: the most bytes held so far.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.now = self.peak = 0
        self._views: Counter[int] = Counter()  # saved ones, by storage
        self._lasting = frozenset(storage._cdata for storage in lasting_storages(modules))

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context; the tensors that autograd saves in it count until they are freed."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        # A subclass, such as a parameter, is more than its storage.
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return tensor
        # An output that its own node saves would never be freed.
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        if storage._cdata in self._lasting:
            return tensor
        if self._views[storage._cdata] == 0:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self._views[storage._cdata] += 1
        weakref.finalize(tensor, self._free, storage._cdata, storage.nbytes())
        return tensor

    def _free(self, storage: int, num_bytes: int) -> None:
        self._views[storage] -= 1
        if self._views[storage] == 0:
            del self._views[storage]
            self.now -= num_bytes


def left_bytes(run: Callable[[], None], iteration: Iteration) -> int:
    """Run a computation; return the bytes that it leaves on the device for later ones.

    A CPU does not count its memory: there these are what autograd holds, without parameters and
    buffers.
    """
    before = held_device_bytes(iteration.device)
    if before is None:
        saved = SavedBytes(iteration.chunks)
        with saved.hooks():
            run()
        return saved.now
    run()
    return (held_device_bytes(iteration.device) or 0) - before
