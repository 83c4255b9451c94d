"""The compiled part of offloading on a GPU: page-locked memory and batched copies.

It is a C library, not a torch extension: built once by ``make build-cuda``, it works with any
torch. Runs on a CPU do not need it.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("offload.cuda.so")
_THREADS = 8  # fault the pages in; more threads do not add memory bandwidth


def pinned_memory(num_bytes: int, numa_node: int | None = None) -> torch.Tensor:
    """Return page-locked host memory, ``[num_bytes]`` of ``uint8``, held until the process ends.

    Args:
        num_bytes: the size; the allocation is rounded up to whole pages.
        numa_node: the NUMA node to allocate on; None leaves that to the system.

    Raises:
        OSError: the host has too little memory, or the driver refuses to lock it.
    """
    error = ctypes.create_string_buffer(256)
    node = -1 if numa_node is None else numa_node
    threads = min(_THREADS, os.cpu_count() or 1)
    handle = _library().fold3d_pinned_open(num_bytes, node, threads, error, len(error))
    if not handle:
        raise OSError(error.value.decode())
    address = _library().fold3d_pinned_data(handle)
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def batched_copy(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    stream: int,
    num_blocks: int | None = None,
) -> None:
    """Copy 1-D tensors between a GPU and page-locked memory, all in one launch on ``stream``.

    The copies are asynchronous: the caller keeps the tensors alive until they are done.

    Args:
        targets: contiguous ``[num_bytes]`` tensors of any dtype; the caller's.
        sources: as many tensors, of the same sizes, valid on ``stream``; the caller's.
        stream: the handle of a CUDA stream other than the default stream. The targets are valid
            on it.
        num_blocks: the thread blocks of a kernel that copies; None leaves it to the copy engines.

    Raises:
        RuntimeError: CUDA refused the launch.
    """
    library, count = _library(), len(targets)
    blocks = () if num_blocks is None else (c_uint(num_blocks),)
    copy = library.fold3d_kernel_copy if blocks else library.fold3d_batched_copy
    error = copy(
        (c_void_p * count)(*(tensor.data_ptr() for tensor in targets)),
        (c_void_p * count)(*(tensor.data_ptr() for tensor in sources)),
        (c_size_t * count)(*(tensor.nbytes for tensor in sources)),
        c_size_t(count),
        *blocks,
        c_void_p(stream),
    )
    if error:
        raise RuntimeError(f"copy of activations: {library.fold3d_cuda_error(error).decode()}")


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
    library.fold3d_cuda_error.restype = c_char_p
    return library
