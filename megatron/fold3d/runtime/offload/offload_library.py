"""The compiled part of offloading on a GPU: page-locked memory and copies in batches.

It is a C library and not an extension of torch's: built once, by ``make build-cuda``, it serves any
torch. A CPU needs none of it.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("_offload.so")
_THREADS = 8  # that fault memory in; more do not help the memory's bandwidth


class PinnedMemory:
    """Page-locked memory of the host, until `close` or the end of the process.

    Attributes:
        tensor: its bytes.

    Args:
        num_bytes: how much, rounded up to whole pages.
        numa_node: where it should be; None leaves it to the system.

    Raises:
        OSError: the host has no such memory, or the driver does not lock it.
    """

    def __init__(self, num_bytes: int, numa_node: int | None = None) -> None:
        error = ctypes.create_string_buffer(256)
        node = -1 if numa_node is None else numa_node
        threads = min(_THREADS, os.cpu_count() or 1)
        self._handle = _library().fold3d_pinned_open(num_bytes, node, threads, error, len(error))
        if not self._handle:
            raise OSError(error.value.decode())
        address = _library().fold3d_pinned_data(self._handle)
        memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Give the memory back; no copy may be under way, and no tensor on it be used again."""
        del self.tensor
        _library().fold3d_pinned_close(self._handle)


def batched_copy(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], stream: int
) -> None:
    """Copy flat tensors between a GPU and page-locked memory, all in one launch.

    Args:
        targets: where to.
        sources: where from, as many and as large.
        stream: the address of a CUDA stream, not of the default one.

    Raises:
        RuntimeError: CUDA refused the launch.
    """
    count = len(targets)
    error = _library().fold3d_batched_copy(
        *_tables(targets, sources), c_size_t(count), c_void_p(stream)
    )
    _check(error)


def kernel_copy(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], stream: int, num_blocks: int
) -> None:
    """Do the same with a kernel, which takes ``num_blocks`` blocks of the GPU's processors."""
    count = len(targets)
    error = _library().fold3d_kernel_copy(
        *_tables(targets, sources), c_size_t(count), c_uint(num_blocks), c_void_p(stream)
    )
    _check(error)


def _tables(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> tuple[ctypes.Array[c_void_p], ctypes.Array[c_void_p], ctypes.Array[c_size_t]]:
    count = len(targets)
    return (
        (c_void_p * count)(*(tensor.data_ptr() for tensor in targets)),
        (c_void_p * count)(*(tensor.data_ptr() for tensor in sources)),
        (c_size_t * count)(*(tensor.nbytes for tensor in sources)),
    )


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"copy of activations: {_library().fold3d_cuda_error(error).decode()}")


@functools.cache
def _library() -> ctypes.CDLL:
    if not LIBRARY.is_file():
        raise ImportError(
            f"no {LIBRARY}: --offload-activations on a GPU needs it; run: make build-cuda"
        )
    library = ctypes.CDLL(str(LIBRARY))
    library.fold3d_pinned_open.restype = c_void_p
    library.fold3d_pinned_open.argtypes = (c_size_t, c_int, c_uint, c_char_p, c_size_t)
    library.fold3d_pinned_data.restype = c_void_p
    library.fold3d_pinned_data.argtypes = (c_void_p,)
    library.fold3d_pinned_close.restype = None
    library.fold3d_pinned_close.argtypes = (c_void_p,)
    library.fold3d_cuda_error.restype = c_char_p
    return library
