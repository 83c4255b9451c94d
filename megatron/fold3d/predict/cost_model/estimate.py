"""Costs before anything has run: from a model's shape, a cluster and how the model is trained.

Placement is Megatron's: tensor-parallel ranks are neighbours, then data-parallel ones, then
pipeline ranks. All replicas of a pipeline do the same at the same time, so only one is simulated,
and its messages and collectives carry what its whole node sends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fold3d.observe.memory_curve import Footprint
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, Split
from megatron.fold3d.predict.cost_model.ring_times import (
    all_gather_s,
    all_reduce_s,
    group_bandwidths,
    reduce_scatter_s,
)
from megatron.fold3d.predict.cost_model.sizes import (
    GRADIENT_BYTES,
    Setup,
    delayed_bytes,
    gradient_bytes,
    message_bytes,
    recomputed_bytes,
    saved_bytes,
    static_bytes,
    working_bytes,
)
from megatron.fold3d.predict.cost_model.transformer import tensor_parallel_elements
from megatron.fold3d.predict.simulator.costs import Costs


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator and the memory curve need to know about a pipeline."""

    costs: Costs
    footprint: Footprint
    nic_of_rank: tuple[int, ...]
    gradient_bytes: tuple[float, ...] = ()
    """Of each stage, on one GPU."""
    cuda_connections: int | None = None
    """Hardware queues that the streams of a GPU share; None is one for each."""


def estimate(
    shape: ModelShape,
    cluster: Cluster,
    setup: Setup,
    *,
    num_ranks: int,
    num_segments: int,
    layers: Sequence[int] = (),
) -> Estimate:
    """Return the costs of a pipeline's actions and the bytes they hold.

    Args:
        shape: the model.
        cluster: all of its GPUs are used.
        setup: how it is trained.
        num_ranks: of a pipeline.
        num_segments: model chunks per rank.
        layers: of each stage; if empty, all have equally many.

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
    num_stages = num_ranks * num_segments
    split: Split = layers or num_stages
    forward_s = _forward_s(shape, cluster, setup, split)
    per_node = min(cluster.gpus_per_node, group)  # GPUs of one pipeline rank in one node
    sent = message_bytes(shape, setup)
    saved = saved_bytes(shape, setup, split)
    gradients, parameters = gradient_bytes(shape, setup, split), shape.stage_parameters(split)
    copy_bytes_per_s = cluster.host_copy_bytes_per_s / cluster.gpus_per_node
    overhead_s, passes = cluster.task_overhead_s, _backward_passes(shape, setup)
    costs = Costs(
        forward_s=tuple(s + overhead_s for s in forward_s),
        backward_s=tuple(passes * s + overhead_s for s in forward_s),
        weight_s=_weight_s(shape, cluster, setup, split),
        recompute_s=tuple(forward_s) if setup.recompute == "full" else (),
        split_s=overhead_s,
        p2p_s=sent * per_node / cluster.goodput_bytes_per_s,
        p2p_latency_s=cluster.nic_latency_s,
        p2p_local_s=sent / cluster.intra_bytes_per_s,
        sends_are_buffered=sent <= cluster.send_buffer_bytes,
        grad_sync_s=tuple(_grad_sync_s(cluster, setup, size) for size in gradients),
        kept_back_s=_kept_back_s(shape, cluster, setup, num_ranks, num_stages),
        param_gather_s=tuple(_param_gather_s(cluster, setup, size) for size in gradients),
        optimizer_s=tuple(
            cluster.iteration_overhead_s * count / sum(parameters[stage % num_ranks :: num_ranks])
            for stage, count in enumerate(parameters)
        ),
        grad_sync_local=group <= cluster.gpus_per_node,
        offload_s=tuple(b / copy_bytes_per_s for b in saved),
        reload_s=tuple(b / copy_bytes_per_s for b in saved),
    )
    ranks_per_node = max(1, cluster.gpus_per_node // group)
    nic_of_rank = tuple(rank // ranks_per_node for rank in range(num_ranks))
    return Estimate(
        costs,
        _footprint(shape, setup, num_ranks, split),
        nic_of_rank,
        tuple(gradients),
        # Megatron demands one with tensor parallelism; CUDA's default is enough for our streams.
        1 if setup.tensor_parallel > 1 and not cluster.is_blackwell else None,
    )


def _footprint(shape: ModelShape, setup: Setup, num_ranks: int, split: Split) -> Footprint:
    saved = saved_bytes(shape, setup, split)
    return Footprint(
        static_bytes=tuple(static_bytes(shape, setup, num_ranks, split)),
        saved_bytes=tuple(saved),
        working_bytes=(working_bytes(shape, setup),) * len(saved),
        delayed_bytes=tuple(delayed_bytes(shape, setup, split)),
        recomputed_bytes=tuple(recomputed_bytes(shape, setup, split)),
    )


def _backward_passes(shape: ModelShape, setup: Setup) -> float:
    """A backward's cost in forwards: two, plus recomputation of layers or attention scores."""
    if setup.recompute == "selective":
        scores = 4 * shape.seq_length**2 * shape.attention_size
        return 2 + scores / shape.layer_flops(0)
    return 3 if setup.recompute == "full" else 2


def _forward_s(
    shape: ModelShape, cluster: Cluster, setup: Setup, split: Split
) -> tuple[float, ...]:
    """One micro-batch's forward of each stage: its FLOPs, and TP.sync, which nothing hides."""
    t = setup.tensor_parallel
    rate = _flops_per_s(cluster, setup)
    bytes_per_s = _bandwidths(cluster, setup)[0]
    elements = tensor_parallel_elements(
        setup.microbatch_size, shape.seq_length, shape.hidden_size, t
    )
    sync_s = elements / 2 * setup.element_bytes / bytes_per_s  # half of a layer's is in its forward
    return tuple(
        setup.microbatch_size * flops / rate + len(layers) * sync_s
        for flops, layers in zip(shape.stage_flops(split), shape.stage_layers(split), strict=True)
    )


def _weight_s(shape: ModelShape, cluster: Cluster, setup: Setup, split: Split) -> tuple[float, ...]:
    """Weight gradients of a stage's layers. Those of embedding and head are never delayed."""
    flops = (sum(map(shape.linear_flops, layers)) for layers in shape.stage_layers(split))
    rate = _flops_per_s(cluster, setup)
    return tuple(setup.microbatch_size * each / rate for each in flops)


def _flops_per_s(cluster: Cluster, setup: Setup) -> float:
    """The FLOP/s of a tensor-parallel group."""
    return cluster.gpu_flops_per_s * cluster.compute_efficiency * setup.tensor_parallel


def _grad_sync_s(cluster: Cluster, setup: Setup, num_bytes: float) -> float:
    """DP.sync of gradients: an all-reduce, or with the distributed optimizer a reduce-scatter."""
    collective = reduce_scatter_s if setup.distributed_optimizer else all_reduce_s
    return collective(setup.data_parallel, num_bytes, _bandwidths(cluster, setup)[1])


def _param_gather_s(cluster: Cluster, setup: Setup, gradient_bytes: float) -> float:
    """DP.sync of updated parameters, which only the distributed optimizer has."""
    if not setup.distributed_optimizer:
        return 0.0
    d, weights_bytes = setup.data_parallel, gradient_bytes / GRADIENT_BYTES * setup.element_bytes
    return all_gather_s(d, weights_bytes / d, _bandwidths(cluster, setup)[1])


def _kept_back_s(
    shape: ModelShape, cluster: Cluster, setup: Setup, num_ranks: int, num_stages: int
) -> tuple[float, ...]:
    """DP.sync that is never deferred: that of word embeddings which two stages share."""
    seconds = [0.0] * num_stages
    if num_ranks > 1 and not shape.untied:
        shared_bytes = shape.embedding_parameters / setup.tensor_parallel * GRADIENT_BYTES
        seconds[0] = seconds[-1] = _grad_sync_s(cluster, setup, shared_bytes)
    return tuple(seconds)


def _bandwidths(cluster: Cluster, setup: Setup) -> tuple[float, ...]:
    """The bandwidths that a tensor-parallel and a data-parallel group see (AxoNN eq. 10)."""
    return group_bandwidths(
        (setup.tensor_parallel, setup.data_parallel),
        cluster.gpus_per_node,
        cluster.intra_bytes_per_s,
        cluster.goodput_bytes_per_s,
    )
