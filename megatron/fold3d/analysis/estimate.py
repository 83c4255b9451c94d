"""Costs before anything has run: from a model's shape, a cluster and how the model is trained.

Placement is Megatron's: tensor-parallel ranks are neighbours, then data-parallel ones, then
pipeline ranks. All replicas of a pipeline do the same at the same time, so one is simulated and
its messages and collectives carry what its whole node sends.
"""

from dataclasses import dataclass

from megatron.fold3d.analysis.cluster import Cluster
from megatron.fold3d.analysis.collectives import (
    all_gather_s,
    all_reduce_s,
    group_bandwidths,
    reduce_scatter_s,
)
from megatron.fold3d.analysis.costs import Costs
from megatron.fold3d.analysis.memory import Footprint
from megatron.fold3d.analysis.model import ModelShape
from megatron.fold3d.analysis.sizes import (
    ELEMENT_BYTES,
    GRADIENT_BYTES,
    Setup,
    gradient_bytes,
    message_bytes,
    saved_bytes,
    static_bytes,
    working_bytes,
)
from megatron.fold3d.analysis.transformer import tensor_parallel_elements


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator and the memory curve need to know about a pipeline."""

    costs: Costs
    footprint: Footprint
    nic_of_rank: tuple[int, ...]


def estimate(
    shape: ModelShape, cluster: Cluster, setup: Setup, *, num_ranks: int, num_segments: int
) -> Estimate:
    """Return the costs of a pipeline's actions and the bytes they hold.

    Raises:
        ValueError: the model cannot be split like this, or the GPUs are not those of the cluster.
    """
    setup.check(shape)
    group = setup.tensor_parallel * setup.data_parallel  # GPUs of one pipeline rank
    if group * num_ranks != cluster.num_gpus:
        raise ValueError(
            f"tensor_parallel={setup.tensor_parallel} x data_parallel={setup.data_parallel} x "
            f"{num_ranks} pipeline ranks are {group * num_ranks} GPUs; {cluster.name} has "
            f"{cluster.num_gpus}"
        )
    stages = num_ranks * num_segments
    forward_s = _forward_s(shape, cluster, setup, stages)
    per_node = min(cluster.gpus_per_node, group)  # GPUs of one pipeline rank in one node
    sent = message_bytes(shape, setup)
    saved = saved_bytes(shape, setup, stages)
    copy_bytes_per_s = cluster.host_copy_bytes_per_s / cluster.gpus_per_node
    overhead_s, passes = cluster.task_overhead_s, _backward_passes(shape, setup)
    costs = Costs(
        forward_s=tuple(s + overhead_s for s in forward_s),
        backward_s=tuple(passes * s + overhead_s for s in forward_s),
        p2p_s=sent * per_node / cluster.goodput_bytes_per_s,
        p2p_latency_s=cluster.nic_latency_s,
        p2p_local_s=sent / cluster.intra_bytes_per_s,
        grad_sync_s=_grad_sync_s(shape, cluster, setup, stages),
        grad_sync_local=group <= cluster.gpus_per_node,
        offload_s=tuple(b / copy_bytes_per_s for b in saved),
        reload_s=tuple(b / copy_bytes_per_s for b in saved),
    )
    footprint = Footprint(
        static_bytes=tuple(static_bytes(shape, setup, num_ranks, stages)),
        saved_bytes=tuple(saved),
        working_bytes=(working_bytes(shape, setup),) * stages,
    )
    ranks_per_node = max(1, cluster.gpus_per_node // group)
    return Estimate(costs, footprint, tuple(rank // ranks_per_node for rank in range(num_ranks)))


def _backward_passes(shape: ModelShape, setup: Setup) -> float:
    """A backward in forwards: two, and what is recomputed, a layer or its attention scores."""
    if setup.recompute == "selective":
        scores = 4 * shape.seq_length**2 * shape.attention_size
        return 2 + scores / shape.layer_flops(0)
    return 3 if setup.recompute == "full" else 2


def _forward_s(
    shape: ModelShape, cluster: Cluster, setup: Setup, num_stages: int
) -> tuple[float, ...]:
    """One micro-batch's forward of each stage: its FLOPs, and TP.sync, which nothing hides."""
    t = setup.tensor_parallel
    rate = cluster.gpu_flops_per_s * cluster.compute_efficiency * t
    bytes_per_s = _bandwidths(cluster, setup)[0]
    elements = tensor_parallel_elements(
        setup.microbatch_size, shape.seq_length, shape.hidden_size, t
    )
    sync_s = elements / 2 * ELEMENT_BYTES / bytes_per_s  # half of a layer's is in its forward
    return tuple(
        setup.microbatch_size * flops / rate + len(layers) * sync_s
        for flops, layers in zip(
            shape.stage_flops(num_stages), shape.stage_layers(num_stages), strict=True
        )
    )


def _grad_sync_s(
    shape: ModelShape, cluster: Cluster, setup: Setup, num_stages: int
) -> tuple[float, ...]:
    """All-reduce, or with the distributed optimizer reduce-scatter and gather of the weights."""
    d, bytes_per_s = setup.data_parallel, _bandwidths(cluster, setup)[1]
    sizes = gradient_bytes(shape, setup, num_stages)
    if not setup.distributed_optimizer:
        return tuple(all_reduce_s(d, size, bytes_per_s) for size in sizes)
    weights = [size / GRADIENT_BYTES * ELEMENT_BYTES for size in sizes]
    return tuple(
        reduce_scatter_s(d, size, bytes_per_s) + all_gather_s(d, weight / d, bytes_per_s)
        for size, weight in zip(sizes, weights, strict=True)
    )


def _bandwidths(cluster: Cluster, setup: Setup) -> tuple[float, ...]:
    """What a tensor-parallel and a data-parallel group see (AxoNN eq. 10)."""
    return group_bandwidths(
        (setup.tensor_parallel, setup.data_parallel),
        cluster.gpus_per_node,
        cluster.intra_bytes_per_s,
        cluster.goodput_bytes_per_s,
    )
