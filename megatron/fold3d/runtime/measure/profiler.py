"""Measure how long the parts of a run take on its own hardware.

All ranks of the job measure at the same time, because they will also compute and send at the same
time. The slowest rank counts. All ranks call the functions in the same order.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from megatron.fold3d.runtime.device import pinned_bytes, synchronize

_ROUNDS = 5
_WARM_UP = 2
_SMALL_BYTES, _LARGE_BYTES = 1 << 16, 1 << 22


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of ``work``, with the device synchronized before and after it."""
    times_s = []
    for _ in range(_WARM_UP + _ROUNDS):
        synchronize(device)
        start_s = time.perf_counter()
        work()
        synchronize(device)
        times_s.append(time.perf_counter() - start_s)
    return median(times_s[_WARM_UP:])


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the element-wise maximum of ``values`` over all ranks of the job."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found.tolist()]


def message(
    pp_group: dist.ProcessGroup, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Return a message's transfer time without latency, and the latency.

    Every rank sends to the next one at the same time.
    """
    ranks = dist.get_process_group_ranks(pp_group)
    here, num_ranks = pp_group.rank(), pp_group.size()
    after, before = ranks[(here + 1) % num_ranks], ranks[here - 1]

    def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
        # Receives first: over gloo a receive's announcement would queue behind bulk data.
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, received, before, pp_group),
                dist.P2POp(dist.isend, sent, after, pp_group),
            ]
        ):
            work.wait()

    def timed(tensor: torch.Tensor) -> float:
        received = torch.empty_like(tensor)
        return seconds(lambda: exchange(tensor, received), device)

    latency_s = timed(torch.zeros(1, device=device))
    whole_s = timed(torch.zeros(tuple(shape), dtype=dtype, device=device))
    return max(0.0, whole_s - latency_s), latency_s


def grad_sync(dp_group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Return an all-reduce's seconds per byte, and its seconds at zero bytes."""
    if dp_group.size() == 1:
        return 0.0, 0.0

    def timed(num_bytes: int) -> float:
        data = torch.zeros(num_bytes // 4, device=device)
        return seconds(lambda: dist.all_reduce(data, group=dp_group), device)

    small_s, large_s = timed(_SMALL_BYTES), timed(_LARGE_BYTES)
    per_byte_s = max(0.0, large_s - small_s) / (_LARGE_BYTES - _SMALL_BYTES)
    return per_byte_s, max(0.0, small_s - per_byte_s * _SMALL_BYTES)


def host_copy_bytes_per_s(device: torch.device) -> float:
    """Return the bandwidth of copies from the device to pinned host memory."""
    data = torch.zeros(_LARGE_BYTES, dtype=torch.uint8, device=device)
    host = pinned_bytes(_LARGE_BYTES, device)
    return _LARGE_BYTES / seconds(lambda: host.copy_(data, non_blocking=True), device)


def layer_flops_per_s(device: torch.device) -> float:
    """Return the FLOP/s of a transformer layer's forward, for a layer of typical size."""
    on_gpu = device.type == "cuda"
    hidden, tokens = (4096, 2048) if on_gpu else (256, 256)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    widths = {"qkv": 3 * hidden, "out": hidden, "up": 4 * hidden}
    weight = {
        name: torch.randn(width, hidden, device=device, dtype=dtype) / hidden**0.5
        for name, width in widths.items()
    }
    down = torch.randn(hidden, 4 * hidden, device=device, dtype=dtype) / hidden**0.5
    inputs = torch.randn(tokens, hidden, device=device, dtype=dtype)
    functional = torch.nn.functional

    def forward() -> torch.Tensor:
        normed = functional.layer_norm(inputs, (hidden,))
        qkv = functional.linear(normed, weight["qkv"]).view(1, tokens, 3, -1, 64)
        query, key, value = qkv.transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        outputs = mixed.transpose(1, 2).reshape(tokens, hidden)
        residual = inputs + functional.linear(outputs, weight["out"])
        normed = functional.layer_norm(residual, (hidden,))
        wide = functional.gelu(functional.linear(normed, weight["up"]))
        return residual + functional.linear(wide, down)

    flops = 24 * tokens * hidden**2 + 4 * tokens**2 * hidden
    with torch.no_grad():
        return flops / seconds(forward, device)
