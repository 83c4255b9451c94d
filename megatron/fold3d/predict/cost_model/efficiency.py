"""The part of its peak that a GPU achieves on a layer: by micro-batch, sequence, hidden size, tp.

Measured rows of a cluster's file come first. Without any, a roofline model is used: each kernel of
a layer takes the longest of its arithmetic, its memory traffic, and its launch.

- A matrix product is cut into tiles, of which each multiprocessor computes one at a time. In the
  last turn half of the multiprocessors idle, so small products are slower.
- Norms, residuals and activations move bytes and compute nearly nothing.
- Every micro-batch reads and writes all weight gradients, so larger micro-batches move fewer bytes.

`Cluster.compute_efficiency` is what large products reach, 0.79 on A100 and 0.66 on V100. Only these
two numbers are fitted; `python -m scripts.bench.efficiency` shows to which published points, and
the error on others. Between measured rows the roofline is scaled to the nearest one.
"""

from collections.abc import Iterator
from functools import cache
from math import log

from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.sizes import Setup

_TILE = 128 * 256
_IDLE_TURNS = 0.5
_MEMORY_SHARE = 0.8  # of the memory's nominal rate, as copies of large tensors reach
_LAUNCH_S = 5e-6
WORST_HELD_OUT = 0.05  # of the roofline, on published points that it was not fitted to

_MEASURE = "`fold3d doctor --write-cluster FILE` measures yours"


def source_of(cluster: Cluster) -> str:
    """Return the source of a cluster's efficiency, as text for a report."""
    if rows := len(cluster.layer_efficiencies):
        return f"measured on {rows} sizes of a layer by fold3d doctor"
    if cluster.memory_bytes_per_s:
        off = f"{WORST_HELD_OUT:.0%}"
        return f"a roofline, within {off} of published A100 and V100 times; {_MEASURE}"
    return f"{cluster.compute_efficiency:.0%} for all sizes, as the cluster's file says; {_MEASURE}"


@cache
def efficiency(cluster: Cluster, shape: ModelShape, setup: Setup) -> float:
    """Return the part of the GPUs' FLOP/s that a layer's forward and backward achieve."""
    sizes = setup.microbatch_size, shape.seq_length, shape.hidden_size, setup.tensor_parallel
    here = tuple(map(float, sizes))
    if not cluster.layer_efficiencies:
        if not cluster.memory_bytes_per_s:
            return cluster.compute_efficiency
        return _roofline(cluster, shape, setup, *here)

    def distance(row: tuple[float, ...]) -> float:
        return sum(abs(log(a / b)) for a, b in zip(row[:4], here, strict=True))

    *nearest, measured = min(cluster.layer_efficiencies, key=distance)
    if not cluster.memory_bytes_per_s:
        return measured
    scale = _roofline(cluster, shape, setup, *nearest)
    return min(1.0, measured * _roofline(cluster, shape, setup, *here) / scale)


def _roofline(cluster: Cluster, shape: ModelShape, setup: Setup, *sizes: float) -> float:
    """Return the part of the GPUs' FLOP/s for given sizes: micro-batch, sequence, hidden, tp."""
    flops = seconds = 0.0
    bytes_per_s = cluster.memory_bytes_per_s * _MEMORY_SHARE
    for kernel_flops, kernel_bytes, tiles in _kernels(shape, setup, *sizes):
        turns = tiles / cluster.multiprocessors
        idle = turns / (turns + _IDLE_TURNS) if tiles else 1.0
        flops += kernel_flops
        reached = cluster.gpu_flops_per_s * cluster.compute_efficiency * idle
        seconds += max(kernel_flops / reached, kernel_bytes / bytes_per_s, _LAUNCH_S)
    return flops / cluster.gpu_flops_per_s / seconds


def _kernels(
    shape: ModelShape, setup: Setup, microbatch: float, sequence: float, hidden: float, t: float
) -> Iterator[tuple[float, float, float]]:
    """Yield (FLOPs, bytes, tiles) of each kernel of a layer's forward and backward.

    The layer is the model's last, scaled to the width ``hidden``. Only matrix products have tiles.
    """
    wider, layer = hidden / shape.hidden_size, shape.num_layers - 1
    tokens = microbatch * sequence / setup.context_parallel
    attended, projected = (wider * size / t for size in (shape.attention_size, shape.qkv_size))
    widths = [(wider * outer, wider * inside / t) for outer, inside in shape.ffn_sizes(layer)]
    gated = 1 + shape.swiglu
    linears = [(hidden, projected), (attended, hidden)]
    if shape.num_experts_in(layer) and (latent := wider * shape.moe_latent_size):
        linears += [(hidden, latent), (latent, hidden)]
    linears += [pair for h, w in widths for pair in ((h, gated * w), (w, h))]
    for inputs, outputs in linears:
        moved = 2 * (tokens * (inputs + outputs) + inputs * outputs)
        each = 2 * tokens * inputs * outputs, moved
        yield *each, tokens * outputs / _TILE  # the forward; then input and weight gradients
        yield *each, tokens * inputs / _TILE
        yield *each, inputs * outputs / _TILE
    scores = tokens * sequence * shape.num_attention_heads / t
    scores *= setup.local_layers  # Transformer Engine's scores never reach the GPU's memory
    whole = t if setup.sequence_parallel else 1
    elementwise = [4 * tokens * hidden / whole] * 2 + [7 * tokens * hidden / whole] * 2
    elementwise += [2 * (gated + 1) * tokens * w for _, w in widths]
    elementwise += [4 * tokens * projected, 4 * scores, 3 * scores]
    for times in (1, 2):  # a backward does twice as much
        for moved in (m for m in elementwise if m):
            yield 0.0, times * moved, 0.0
        for _ in range(2):
            yield times * 2 * tokens * sequence * attended, times * 2 * scores, 0.0
    parameters = sum(inputs * outputs for inputs, outputs in linears)
    yield 0.0, parameters * (2 * setup.gradient_bytes + 4 * setup.local_layers), 0.0
