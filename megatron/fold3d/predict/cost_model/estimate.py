"""Costs before anything has run: from a model's shape, a cluster and how the model is trained.

Placement is Megatron's: tensor-parallel ranks are neighbours, then data-parallel ones, then
pipeline ranks. With ``--use-tp-pp-dp-mapping`` pipeline ranks come before data-parallel ones, so
that PP.sync stays inside nodes rather than DP.sync.

All replicas of a pipeline do the same at the same time, so only one is simulated, and its messages
and collectives carry the traffic of its whole node. `placement` adds the links between switches,
and `stragglers` makes the simulated pipeline the one with the slowest GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from megatron.fold3d.observe.memory_curve import Footprint
from megatron.fold3d.policy.shard_order import started_shares
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.efficiency import efficiency
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, Split
from megatron.fold3d.predict.cost_model.placement import gpus_together, routes
from megatron.fold3d.predict.cost_model.ring_times import (
    all_gather_s,
    all_reduce_s,
    group_bandwidths,
    reduce_scatter_s,
)
from megatron.fold3d.predict.cost_model.sizes import (
    Setup,
    delayed_bytes,
    exchanged_bytes,
    expert_gradient_bytes,
    gradient_bytes,
    message_bytes,
    recomputed_bytes,
    saved_bytes,
    static_bytes,
    working_bytes,
)
from megatron.fold3d.predict.cost_model.stragglers import slowdowns
from megatron.fold3d.predict.cost_model.training_flops import recomputed_flops
from megatron.fold3d.predict.cost_model.transformer import tensor_parallel_elements
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.routes import NO_SWITCHES, Routes


@dataclass(frozen=True, slots=True)
class Estimate:
    """A pipeline's costs and sizes, for the simulator and the memory curve."""

    costs: Costs
    footprint: Footprint
    nic_of_rank: tuple[int, ...]
    gradient_bytes: tuple[float, ...] = ()
    """Of each stage, on one GPU."""
    cuda_connections: int | None = None
    """Hardware queues that the streams of a GPU share; None is one for each."""
    routes: Routes = NO_SWITCHES
    """Links between switches that are scarcer than NICs."""
    shard_shares: tuple[tuple[float, float], ...] = ()
    """As in `Link`, of reductions to shards between weight gradients."""
    launches: tuple[int, ...] = ()
    """By stage, the collectives of its DP.sync where something else than `launches` says it."""

    def link(self, **rules: Any) -> Link:
        """Return how a plan runs on these links, by some more rules."""
        return Link(
            in_order=True,
            nic_of_rank=self.nic_of_rank,
            routes=self.routes,
            shard_shares=self.shard_shares,
            **rules,
        )


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
        num_ranks: ranks of a pipeline.
        num_segments: model chunks per rank.
        layers: layers of each stage; if empty, all have equally many.

    Raises:
        ValueError: the model cannot be split like this, or the GPUs are not those of the cluster.
    """
    setup.check(shape)
    group = setup.tensor_parallel * setup.num_replicas  # GPUs of one pipeline rank
    if group * num_ranks != cluster.num_gpus:
        shared = setup.context_parallel
        raise ValueError(
            f"tensor_parallel={setup.tensor_parallel} x data_parallel={setup.data_parallel} x "
            f"{f'context_parallel={shared} x ' if shared > 1 else ''}"
            f"{num_ranks} pipeline ranks are {group * num_ranks} GPUs; {cluster.name} has "
            f"{cluster.num_gpus}"
        )
    num_stages = num_ranks * num_segments
    split: Split = layers or num_stages
    forward_s = _forward_s(shape, cluster, setup, split)
    together = gpus_together(setup)
    per_node = min(cluster.gpus_per_node, together)  # GPUs of one pipeline rank in one node
    sent = message_bytes(shape, setup)
    saved = saved_bytes(shape, setup, split)
    gradients = gradient_bytes(shape, setup, split)
    experts = expert_gradient_bytes(shape, setup, split)
    synced = [sum(sizes) for sizes in zip(gradients, experts, strict=True)]
    context_s = _context_s(shape, cluster, setup, split)
    tokens_s = _tokens_s(shape, cluster, setup, split)
    copy_bytes_per_s = cluster.host_copy_bytes_per_s / cluster.gpus_per_node
    overhead_s = cluster.task_overhead_s
    slower = slowdowns(cluster, setup, num_ranks, shape.stage_flops(split))
    late_s = tuple(
        (factor - 1) * s
        for factor, s in zip(slower, _compute_s(shape, cluster, setup, split), strict=True)
    )
    again_s = _recompute_s(shape, cluster, setup, split, slower)
    costs = Costs(
        forward_s=tuple(
            sum(parts_s) + overhead_s
            for parts_s in zip(forward_s, context_s, tokens_s, late_s, strict=True)
        ),
        backward_s=tuple(
            2 * (s + keys_s + more_s) + sent_s + overhead_s + recomputed_s
            for s, keys_s, sent_s, more_s, recomputed_s in zip(
                forward_s, context_s, tokens_s, late_s, again_s, strict=True
            )
        ),
        weight_s=tuple(
            factor * s
            for factor, s in zip(slower, _weight_s(shape, cluster, setup, split), strict=True)
        ),
        recompute_s=again_s if setup.recompute == "full" else (),
        tp_sync_s=_tp_sync_s(shape, cluster, setup, split),
        ep_sync_s=tokens_s,
        ep_sync_on_nic=prod(setup.expert_ranks) > cluster.gpus_per_node,
        collectives=tuple(
            2 * (setup.tensor_parallel > 1) * len(of_stage)
            + 2 * (setup.expert_parallel > 1) * sum(map(bool, map(shape.num_experts_in, of_stage)))
            for of_stage in shape.stage_layers(split)
        ),
        split_s=overhead_s,
        p2p_s=sent * per_node / cluster.goodput_bytes_per_s,
        p2p_latency_s=cluster.nic_latency_s,
        p2p_local_s=sent / cluster.intra_bytes_per_s,
        sends_are_buffered=sent <= cluster.send_buffer_bytes,
        rings_are_buffered=sent <= cluster.ring_buffer_bytes,
        grad_sync_s=tuple(
            _grad_sync_s(cluster, setup, num_ranks, size)
            + _expert_sync_s(cluster, setup, num_ranks, of_experts)
            for size, of_experts in zip(gradients, experts, strict=True)
        ),
        reduced_in_iteration_s=_reduced_in_iteration_s(
            shape, cluster, setup, num_ranks, num_stages
        ),
        param_gather_s=tuple(
            _param_gather_s(cluster, setup, num_ranks, size, of_experts)
            for size, of_experts in zip(gradients, experts, strict=True)
        ),
        optimizer_s=tuple(
            cluster.iteration_overhead_s * count / of_rank
            if (of_rank := sum(synced[stage % num_ranks :: num_ranks]))
            else 0.0
            for stage, count in enumerate(synced)
        ),
        grad_sync_local=_replicas_span(setup, num_ranks) <= cluster.gpus_per_node,
        offload_s=tuple(b / copy_bytes_per_s for b in saved),
        reload_s=tuple(b / copy_bytes_per_s for b in saved),
    )
    ranks_per_node = max(1, cluster.gpus_per_node // together)
    nic_of_rank = tuple(rank // ranks_per_node for rank in range(num_ranks))
    return Estimate(
        costs,
        footprint_of(shape, setup, num_ranks, split),
        nic_of_rank,
        tuple(synced),
        # Megatron demands one with tensor parallelism; CUDA's default is enough for our streams.
        1 if _needs_one_queue(setup) and not cluster.is_blackwell else None,
        routes(cluster, setup, num_ranks),
        started_shares(min(map(len, shape.stage_layers(split))), setup.num_replicas),
    )


def _needs_one_queue(setup: Setup) -> bool:
    return setup.tensor_parallel > 1 or setup.context_parallel > 1


def footprint_of(shape: ModelShape, setup: Setup, num_ranks: int, split: Split) -> Footprint:
    """Return the bytes that ranks, and micro-batches of stages, hold.

    Args:
        shape: the model.
        setup: how it is trained.
        num_ranks: ranks of a pipeline.
        split: the layers of each stage, or the number of stages with equally many.
    """
    saved = saved_bytes(shape, setup, split)
    return Footprint(
        static_bytes=tuple(static_bytes(shape, setup, num_ranks, split)),
        saved_bytes=tuple(saved),
        working_bytes=tuple(working_bytes(shape, setup, split)),
        delayed_bytes=tuple(delayed_bytes(shape, setup, split)),
        recomputed_bytes=tuple(recomputed_bytes(shape, setup, split)),
    )


def _forward_s(
    shape: ModelShape, cluster: Cluster, setup: Setup, split: Split
) -> tuple[float, ...]:
    """One micro-batch's forward of each stage: its FLOPs, and TP.sync, which nothing hides."""
    return tuple(
        s + sync_s
        for s, sync_s in zip(
            _compute_s(shape, cluster, setup, split),
            _tp_sync_s(shape, cluster, setup, split),
            strict=True,
        )
    )


def _compute_s(
    shape: ModelShape, cluster: Cluster, setup: Setup, split: Split
) -> tuple[float, ...]:
    rate = _flops_per_s(shape, cluster, setup)
    return tuple(
        setup.microbatch_size * flops / rate / setup.context_parallel
        for flops in shape.stage_flops(split)
    )


def _tp_sync_s(
    shape: ModelShape, cluster: Cluster, setup: Setup, split: Split
) -> tuple[float, ...]:
    """TP.sync of one micro-batch's forward of each stage."""
    bytes_per_s = _bandwidths(cluster, setup, 1)[0]
    elements = (
        tensor_parallel_elements(
            setup.microbatch_size, shape.seq_length, shape.hidden_size, setup.tensor_parallel
        )
        / setup.context_parallel
    )
    sync_s = elements / 2 * setup.element_bytes / bytes_per_s  # half of a layer's is in its forward
    return tuple(len(layers) * sync_s for layers in shape.stage_layers(split))


def _recompute_s(
    shape: ModelShape, cluster: Cluster, setup: Setup, split: Split, slower: Sequence[float]
) -> tuple[float, ...]:
    """What a backward of each stage recomputes: layers with all they send, or scores alone."""
    rate = _flops_per_s(shape, cluster, setup) * setup.context_parallel
    flops = recomputed_flops(shape, setup.recompute, split)
    whole = setup.recompute == "full"
    sent_s = [each(shape, cluster, setup, split) for each in _SENT]
    sync_s = (
        [sum(parts_s) for parts_s in zip(*sent_s, strict=True)] if whole else (0.0,) * len(flops)
    )
    return tuple(
        factor * setup.microbatch_size * each / rate + s
        for factor, each, s in zip(slower, flops, sync_s, strict=True)
    )


def _weight_s(shape: ModelShape, cluster: Cluster, setup: Setup, split: Split) -> tuple[float, ...]:
    """Weight gradients of a stage's layers. Those of embedding and head are never delayed."""
    flops = (sum(map(shape.linear_flops, layers)) for layers in shape.stage_layers(split))
    rate = _flops_per_s(shape, cluster, setup)
    return tuple(setup.microbatch_size * each / rate / setup.context_parallel for each in flops)


def _context_s(
    shape: ModelShape, cluster: Cluster, setup: Setup, split: Split
) -> tuple[float, ...]:
    """Keys and values of one micro-batch's forward of each stage, passed around a ring.

    A backward passes them and their gradients.
    """
    bytes_per_s = group_bandwidths(
        (setup.tensor_parallel, setup.context_parallel),
        cluster.gpus_per_node,
        cluster.intra_bytes_per_s,
        cluster.goodput_bytes_per_s,
    )[1]
    return tuple(
        sum(exchanged_bytes(shape, setup, layer)[0] for layer in layers) / bytes_per_s
        for layers in shape.stage_layers(split)
    )


def _tokens_s(shape: ModelShape, cluster: Cluster, setup: Setup, split: Split) -> tuple[float, ...]:
    """The all-to-alls of one micro-batch's forward of each stage; its backward has as many.

    Every GPU of a node sends at once: to the experts of its node over the node's own links, and to
    those of other nodes over the NICs that all of them share.
    """
    shared, ranks = setup.expert_ranks
    per_node = cluster.gpus_per_node
    peers, here = max(1, ranks - 1), min(ranks, max(1, per_node // shared)) - 1
    byte_s = max(
        here / peers / cluster.intra_bytes_per_s,
        (1 - here / peers) * per_node / cluster.goodput_bytes_per_s,
    )
    return tuple(
        sum(exchanged_bytes(shape, setup, layer)[1] for layer in layers) * byte_s
        for layers in shape.stage_layers(split)
    )


_SENT = (_tp_sync_s, _context_s, _tokens_s)


def _flops_per_s(shape: ModelShape, cluster: Cluster, setup: Setup) -> float:
    """The FLOP/s of a tensor-parallel group."""
    achieved = efficiency(cluster, shape, setup)
    return cluster.gpu_flops_per_s * achieved * setup.tensor_parallel


def _grad_sync_s(cluster: Cluster, setup: Setup, num_ranks: int, num_bytes: float) -> float:
    """DP.sync of gradients: an all-reduce, or with the distributed optimizer a reduce-scatter.

    That in 32 bits is an all-to-all: what replicas of one node send to the others all leaves the
    node, where a ring adds it up on its way.
    """
    n, bytes_per_s = setup.num_replicas, _bandwidths(cluster, setup, num_ranks)[1]
    if not setup.distributed_optimizer:
        return all_reduce_s(n, num_bytes, bytes_per_s)
    span, seconds = _replicas_span(setup, num_ranks), reduce_scatter_s(n, num_bytes, bytes_per_s)
    if not setup.scatters_in_fp32 or span <= cluster.gpus_per_node:
        return seconds
    together = max(1, cluster.gpus_per_node * n // span)  # replicas of a node
    return seconds * together * (n - together) / (n - 1)


def _expert_sync_s(cluster: Cluster, setup: Setup, num_ranks: int, num_bytes: float) -> float:
    """DP.sync of the gradients of experts, which have fewer replicas; always counted as a ring."""
    collective = reduce_scatter_s if setup.distributed_optimizer else all_reduce_s
    bytes_per_s = _expert_bandwidth(cluster, setup, num_ranks)
    return collective(setup.num_expert_replicas, num_bytes, bytes_per_s)


def _param_gather_s(
    cluster: Cluster, setup: Setup, num_ranks: int, gradient_bytes: float, of_experts: float
) -> float:
    """DP.sync of updated parameters, which only the distributed optimizer has."""
    if not setup.distributed_optimizer:
        return 0.0
    smaller = setup.element_bytes / setup.gradient_bytes
    d, e = setup.num_replicas, setup.num_expert_replicas
    dense, experts = gradient_bytes * smaller, of_experts * smaller / e
    return all_gather_s(d, dense / d, _bandwidths(cluster, setup, num_ranks)[1]) + all_gather_s(
        e, experts, _expert_bandwidth(cluster, setup, num_ranks)
    )


def _reduced_in_iteration_s(
    shape: ModelShape, cluster: Cluster, setup: Setup, num_ranks: int, num_stages: int
) -> tuple[float, ...]:
    """DP.sync that is never deferred: that of word embeddings which two stages share."""
    seconds = [0.0] * num_stages
    if num_ranks > 1 and not shape.untied:
        t = setup.tensor_parallel
        shared_bytes = shape.padded(t).embedding_parameters / t * setup.gradient_bytes
        seconds[0] = seconds[-1] = _grad_sync_s(cluster, setup, num_ranks, shared_bytes)
    return tuple(seconds)


def _replicas_span(setup: Setup, num_ranks: int) -> int:
    """GPUs from the first to the last of a data-parallel group."""
    inside = 1 if setup.order == "tp-dp-pp" else num_ranks
    return setup.tensor_parallel * inside * setup.num_replicas


def _expert_bandwidth(cluster: Cluster, setup: Setup, num_ranks: int) -> float:
    """The bandwidth that a group of GPUs with the same experts sees."""
    return _with_replicas(
        cluster, setup, num_ranks, (*setup.expert_ranks, setup.num_expert_replicas)
    )[2]


def _bandwidths(cluster: Cluster, setup: Setup, num_ranks: int) -> tuple[float, ...]:
    """The bandwidths that a tensor-parallel and a data-parallel group see (AxoNN eq. 10)."""
    return _with_replicas(cluster, setup, num_ranks, (setup.tensor_parallel, setup.num_replicas))


def _with_replicas(
    cluster: Cluster, setup: Setup, num_ranks: int, sizes: tuple[int, ...]
) -> tuple[float, ...]:
    """Return the bandwidths of groups inside each other, of which the last are of replicas.

    Pipeline ranks of one node share its NIC when they use it at the same time, which the simulator
    sees. So they do not count as rings that always do.
    """
    *inner, replicas = group_bandwidths(
        sizes,
        cluster.gpus_per_node,
        cluster.intra_bytes_per_s,
        cluster.goodput_bytes_per_s,
    )
    if setup.order == "tp-pp-dp" and _replicas_span(setup, num_ranks) > cluster.gpus_per_node:
        rings = prod(sizes[:-1])
        replicas = cluster.goodput_bytes_per_s / min(cluster.gpus_per_node, rings)
    return (*inner, replicas)
