"""The codes of ``--delta-param-gather`` and ``--coded-grad-reduce``: exact, in fewer bits.

``csrc/delta_code.h`` has the code. It is built as C libraries, not as torch extensions: for CPUs by
``make extension``, for GPUs by ``make build-cuda``.
"""

import ctypes
import functools
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch

from megatron.fold3d.config.gpu_settings import DELTA_LIBRARIES

MANTISSAS = {torch.bfloat16: 7, torch.float16: 10}
"""The bits of a mantissa, for each dtype of parameters that can be coded."""
WORD = 4  # bytes
SPARE_WORDS = 2  # what a decoder may read behind a message
WORTH = 2
"""Times its cost is what a code has to save: ranks that share a machine's cores pay more."""
_BLOCK = 4096  # values


def encode(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the message from which `decode` makes ``new`` out of ``old``.

    Args:
        new: contiguous ``[num_values]`` of a dtype in `MANTISSAS`, of at least one value.
        old: the same, of what the receivers hold.

    Returns:
        int32 words on the same device, as many as ``new`` has bytes for. The first one is how many
        words the message takes; it is complete only if these are no more.
    """
    message = torch.empty(new.nbytes // WORD + 8, dtype=torch.int32, device=new.device)
    _call("delta_encode", new, old, MANTISSAS[new.dtype], new.numel(), message, message.numel())
    return message


def decode(message: torch.Tensor, values: torch.Tensor) -> None:
    """Replace old values in place by new ones.

    Args:
        message: int32 words of `encode`, with `SPARE_WORDS` of memory behind them.
        values: what `encode` had as ``old``.
    """
    _call("delta_decode", message, values, MANTISSAS[values.dtype], values.numel())


def encode_gradients(values: torch.Tensor, message: torch.Tensor) -> None:
    """Write the message from which `decode_gradients` makes values.

    Args:
        values: contiguous ``[num_values]`` in bf16 or fp32.
        message: int32 words, with room for the table of blocks. The first one becomes how many
            words are needed; the message is complete only if it has as many.
    """
    _call("gradient_encode", values, _halves(values), values.numel(), message, message.numel())


def decode_gradients(message: torch.Tensor, values: torch.Tensor) -> None:
    """Write values in place.

    Args:
        message: of `encode_gradients`, with `SPARE_WORDS` of memory behind it.
        values: contiguous ``[num_values]`` in the same dtype.
    """
    _call("gradient_decode", message, values, _halves(values), values.numel())


def table_words(values: torch.Tensor) -> int:
    """Return the words of a message of gradients ``[num_values]`` before its codes."""
    return 1 + 2 * _halves(values) * -(-values.numel() // _BLOCK)


def _halves(values: torch.Tensor) -> int:
    """Return how many parts of 16 bits each value has, which are coded apart."""
    return values.element_size() // 2


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Return an int64 scalar that is the same for the same values, on their device.

    Args:
        values: contiguous ``[num_values]`` of a dtype in `MANTISSAS`.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    _call("delta_hash", values, values.numel(), total)
    return total


def _call(name: str, first: torch.Tensor, *others: torch.Tensor | int) -> None:
    """Call one of the code's functions, whose tensors are on one device."""
    given = [c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in (first, *others)]
    function = getattr(_library(first.device.type), f"fold3d_{name}")
    if first.device.type == "cpu":
        function(*given)
    elif error := function(*given, c_void_p(torch.cuda.current_stream(first.device).cuda_stream)):
        raise RuntimeError(f"{name} of delta_code.cu is refused by CUDA: error {error}")


@functools.cache
def _library(device: str) -> Any:
    library = ctypes.CDLL(str(DELTA_LIBRARIES[device]))
    stream = [c_void_p] * (device == "cuda")
    for name, arguments in (
        ("delta_encode", (c_void_p, c_void_p, c_int, c_int64, c_void_p, c_int64)),
        ("delta_decode", (c_void_p, c_void_p, c_int, c_int64)),
        ("gradient_encode", (c_void_p, c_int, c_int64, c_void_p, c_int64)),
        ("gradient_decode", (c_void_p, c_void_p, c_int, c_int64)),
        ("delta_hash", (c_void_p, c_int64, c_void_p)),
    ):
        function = getattr(library, f"fold3d_{name}")
        function.argtypes = [*arguments, *stream]
        function.restype = c_int if stream else None
    return library
