"""Measure layers of many sizes, and the memory of a device.

They are layers of no run: `fold3d doctor` describes a machine with their rates.
"""

import time
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from megatron.fold3d.runtime.agreement import slowest
from megatron.fold3d.runtime.measure.timing import seconds


class LayerSizes(NamedTuple):
    """What the time of a transformer layer depends on."""

    microbatch: int
    sequence: int
    hidden: int
    tensor_parallel: int

    @property
    def flops(self) -> float:
        """Of a forward and a backward, on one of the tensor-parallel ranks."""
        tokens = self.microbatch * self.sequence
        forward = 24 * tokens * self.hidden**2 + 4 * tokens * self.sequence * self.hidden
        return 3 * forward / self.tensor_parallel


_ON_GPU = [
    LayerSizes(microbatch, sequence, hidden, tp)
    for hidden, tp, (microbatch, sequence) in product(
        (4096, 8192, 2048), (1, 8, 4, 2), ((1, 2048), (4, 2048), (2, 2048), (1, 8192))
    )
]
_ON_CPU = [LayerSizes(microbatch, 128, 256, tp) for microbatch, tp in product((1, 4), (1, 2))]


def layer_rates(
    device: torch.device, limit_s: float = 60.0
) -> tuple[list[tuple[LayerSizes, float]], float]:
    """Return the FLOP/s of layers on the slowest rank, and how much the first one has changed.

    Layers are of many sizes, until the time is over. The first is measured again at the end: where
    its time has changed by a large part, something else computes too.
    """
    start_s = time.perf_counter()
    found: list[tuple[LayerSizes, float]] = []
    for sizes in _ON_GPU if device.type == "cuda" else _ON_CPU:
        layer_s, elapsed_s = slowest(
            [layer_seconds(sizes, device), time.perf_counter() - start_s], device
        )
        found.append((sizes, sizes.flops / layer_s))
        if elapsed_s > limit_s:
            break
    first, rate = found[0]
    (again_s,) = slowest([layer_seconds(first, device)], device)
    return found, abs(first.flops / again_s / rate - 1)


def layer_seconds(sizes: LayerSizes, device: torch.device) -> float:
    """Return the seconds of a layer's forward and backward, without its collectives.

    Of a tensor-parallel group it is one rank's part. Gradients add to those of before.
    """
    hidden, width = sizes.hidden, sizes.hidden // sizes.tensor_parallel
    dtype = torch.float32
    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
        dtype = torch.bfloat16 if has_bf16 else torch.float16

    linear = partial(torch.nn.Linear, bias=False, device=device, dtype=dtype)
    qkv, out = linear(hidden, 3 * width), linear(width, hidden)
    up, down = linear(hidden, 4 * width), linear(4 * width, hidden)
    shape = sizes.microbatch, sizes.sequence, hidden
    inputs = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.ones_like(inputs)
    functional = torch.nn.functional

    def layer() -> None:
        normed = functional.layer_norm(inputs, (hidden,))
        parts = qkv(normed).view(*shape[:2], 3, -1, 64)
        query, key, value = parts.transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        outputs = mixed.transpose(1, 2).reshape(*shape[:2], width)
        residual = inputs + out(outputs)
        normed = functional.layer_norm(residual, (hidden,))
        wide = functional.gelu(up(normed))
        (residual + down(wide)).backward(gradient)

    return seconds(layer, device)


def memory_bytes_per_s(device: torch.device) -> float:
    """Return the rate at which a device reads its memory, and writes it, together."""
    num_bytes = (1 << 30) if device.type == "cuda" else (1 << 22)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device)
