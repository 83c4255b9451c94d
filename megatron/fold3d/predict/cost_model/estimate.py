"""Costs before anything has run, estimated from a model's shape, a cluster and a training setup.

Placement is Megatron's: tensor-parallel ranks are neighbours, then data-parallel ones, then
pipeline ranks. With ``--use-tp-pp-dp-mapping`` pipeline ranks come before data-parallel ones, so
that PP.sync stays inside nodes rather than DP.sync.

All replicas of a pipeline do the same at the same time, so only one is simulated, and its messages
and collectives carry the traffic of its whole node. `placement` adds the links between switches,
and `stragglers` gives the simulated pipeline the slowest GPU.
"""

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import starmap
from math import prod
from typing import Any

from megatron.fold3d.observe.memory_curve import Footprint
from megatron.fold3d.policy.shard_order import started_shares
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.coded_sync import CODED_BYTES_PER_S
from megatron.fold3d.predict.cost_model.efficiency import efficiency
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, Split
from megatron.fold3d.predict.cost_model.placement import gpus_together, nic_of_rank, routes
from megatron.fold3d.predict.cost_model.ring_times import (
    all_gather_s,
    all_reduce_s,
    group_bandwidths,
    reduce_scatter_s,
)
from megatron.fold3d.predict.cost_model.sizes import (
    Setup,
    context_bytes,
    delayed_bytes,
    expert_bytes,
    held_parameters,
    layer_bytes,
    message_bytes,
    saved_bytes,
    static_bytes,
    tensor_parallel_bytes,
    working_bytes,
)
from megatron.fold3d.predict.cost_model.stragglers import slowdowns
from megatron.fold3d.predict.cost_model.training_flops import recomputed_flops, recomputed_shares
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import NO_SWITCHES, Link, Routes


@dataclass(frozen=True, slots=True)
class Estimate:
    """A pipeline's costs and sizes, for the simulator and the memory curve."""

    costs: Costs
    footprint: Footprint
    nic_of_rank: tuple[int, ...]
    gradient_bytes: tuple[float, ...] = ()
    """Bytes of each stage's gradients on one GPU."""
    cuda_connections: int | None = None
    """Hardware queues that the streams of a GPU share; None gives each stream its own."""
    routes: Routes = NO_SWITCHES
    """Links between switches that are scarcer than NICs."""
    shard_shares: tuple[tuple[float, float], ...] = ()
    """Starts of reductions to shards between weight gradients: see `Link`."""
    launches: tuple[int, ...] = ()
    """By stage, the collectives of its DP.sync; if empty, `launches.launches` counts them."""

    def link(self, **rules: Any) -> Link:
        """Return the simulation's rules with these links, and with further fields of `Link`."""
        return Link(
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
    recompute_layers: Sequence[int] = (),
    replicated: Collection[int] = (),
) -> Estimate:
    """Return the costs of a pipeline's actions, and the bytes that they hold.

    Args:
        cluster: all of its GPUs are used.
        layers: layers of each stage; if empty, all stages have equally many.
        recompute_layers: how many layers each stage recomputes; if empty, ``setup`` decides.
        replicated: stages that every replica steps in full, although the optimizer is distributed.

    Raises:
        ValueError: the model cannot be split like this, or the sizes do not use all GPUs.
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
    split = layers or num_ranks * num_segments
    pipeline = _Pipeline(shape, cluster, setup, num_ranks, split, recompute_layers)
    one_queue = max(setup.tensor_parallel, setup.context_parallel) > 1
    costs = pipeline.costs().with_replicated(replicated)
    if setup.summed_bits:
        costs = costs.with_coded_sums(pipeline.sent_shares(costs.grad_sync_s), replicated)
    return Estimate(
        costs,
        footprint_of(shape, setup, num_ranks, split, recompute_layers, replicated),
        nic_of_rank(cluster, setup, num_ranks),
        pipeline.synced_bytes,
        # Megatron demands one with tensor parallelism; CUDA's default is enough for our streams.
        1 if one_queue and not cluster.is_blackwell else None,
        routes(cluster, setup, num_ranks),
        started_shares(min(map(len, shape.stage_layers(split))), setup.most_replicas),
    )


def footprint_of(
    shape: ModelShape,
    setup: Setup,
    num_ranks: int,
    split: Split,
    counts: Sequence[int] = (),
    replicated: Container[int] = (),
) -> Footprint:
    """Return the bytes that ranks, and micro-batches of stages, hold.

    Args:
        split: the layers of each stage, or the number of stages with equally many.
        counts: ``recompute_layers`` of `estimate`.
    """
    full = setup.recompute == "full"
    shares = recomputed_shares(shape, split, counts)
    again = shape.by_stage(lambda n: layer_bytes(shape, setup, "none", n) if full else 0.0, split)
    saved = saved_bytes(shape, setup, split)
    if counts:
        layers = shape.stage_layers(split)
        kept = layer_bytes(shape, setup, "none") - layer_bytes(shape, setup, "full")
        each = zip(saved, layers, counts, strict=True)
        saved = [own + (len(all_) - count) * kept for own, all_, count in each]
    working = zip(working_bytes(shape, setup, split), shares, strict=True)
    return Footprint(
        static_bytes=tuple(static_bytes(shape, setup, num_ranks, split, replicated)),
        saved_bytes=tuple(saved),
        working_bytes=tuple(own if share else 0.0 for own, share in working),
        delayed_bytes=tuple(delayed_bytes(shape, setup, split)),
        recomputed_bytes=tuple(own * share for own, share in zip(again, shares, strict=True)),
    )


@dataclass(frozen=True)
class _Pipeline:
    """The stages of a model on a cluster, and the seconds of their actions.

    Methods return seconds by stage: DP.sync's, or otherwise those of one micro-batch's forward.
    """

    shape: ModelShape
    cluster: Cluster
    setup: Setup
    num_ranks: int
    split: Split
    recompute_layers: Sequence[int]

    def costs(self) -> Costs:
        """Return the costs of all actions."""
        shape, cluster, setup, split = self.shape, self.cluster, self.setup, self.split
        flops = shape.stage_flops(split)
        compute_s, sync_s = self._computed_s(flops), self._tp_sync_s()
        context_s, tokens_s = self._context_s(), self._tokens_s()
        overhead_s = cluster.task_overhead_s
        slower = slowdowns(cluster, setup, self.num_ranks, flops)
        late_s = [(factor - 1) * s for factor, s in zip(slower, compute_s, strict=True)]
        again_s = self._recomputed_s(slower, zip(sync_s, context_s, tokens_s, strict=True))
        parts_s = [
            (s + sent_s, *others_s)
            for s, sent_s, *others_s in zip(
                compute_s, sync_s, context_s, tokens_s, late_s, strict=True
            )
        ]
        weight_s = self._computed_s(shape.by_stage(shape.linear_flops, split))
        sent = message_bytes(shape, setup)
        per_node = min(cluster.gpus_per_node, gpus_together(setup))  # GPUs of a rank in a node
        synced, ranks = self.synced_bytes, self.num_ranks
        copy_bytes_per_s = cluster.host_copy_bytes_per_s / cluster.gpus_per_node
        copy_s = tuple(b / copy_bytes_per_s for b in saved_bytes(shape, setup, split))
        return Costs(
            forward_s=tuple(sum(of_stage) + overhead_s for of_stage in parts_s),
            backward_s=tuple(
                2 * (s + keys_s + more_s) + sent_s + overhead_s + recomputed_s
                for (s, keys_s, sent_s, more_s), recomputed_s in zip(parts_s, again_s, strict=True)
            ),
            # Weight gradients of embedding and head are never delayed.
            weight_s=tuple(factor * s for factor, s in zip(slower, weight_s, strict=True)),
            recompute_s=again_s if setup.recompute == "full" else (),
            tp_sync_s=sync_s,
            ep_sync_s=tokens_s,
            ep_sync_on_nic=prod(setup.expert_ranks) > cluster.gpus_per_node,
            collectives=tuple(shape.by_stage(self._collectives, split)),
            split_s=overhead_s,
            p2p_s=sent * per_node / cluster.goodput_bytes_per_s,
            p2p_latency_s=cluster.nic_latency_s,
            p2p_local_s=sent / cluster.intra_bytes_per_s,
            sends_are_buffered=sent <= cluster.send_buffer_bytes,
            rings_are_buffered=sent <= cluster.ring_buffer_bytes,
            grad_sync_s=tuple(
                self._grad_sync_s(size) + self._expert_sync_s(of_experts)
                for size, of_experts in self._gradient_bytes
            ),
            reduced_in_iteration_s=self._reduced_in_iteration_s(len(synced)),
            param_gather_s=tuple(starmap(self._param_gather_s, self._gradient_bytes)),
            optimizer_s=tuple(
                cluster.iteration_overhead_s * size / of_rank
                if (of_rank := sum(synced[stage % ranks :: ranks]))
                else 0.0
                for stage, size in enumerate(synced)
            ),
            grad_sync_local=self._replicas_span <= cluster.gpus_per_node,
            offload_s=copy_s,
            reload_s=copy_s,
        )

    @property
    def synced_bytes(self) -> tuple[float, ...]:
        """The bytes of each stage's gradients on one GPU."""
        return tuple(map(sum, self._gradient_bytes))

    @cached_property
    def _gradient_bytes(self) -> tuple[tuple[float, float], ...]:
        """By stage, the bytes of dense gradients and of experts', which have other replicas."""
        each = self.setup.gradient_bytes
        held = held_parameters(self.shape, self.setup, self.split)
        return tuple((of_stage.dense * each, of_stage.experts * each) for of_stage in held)

    def _collectives(self, layer: int) -> int:
        """Return the collectives of a layer's forward that a pair of micro-batches may hide."""
        to_experts = self.setup.expert_parallel > 1 and self.shape.num_experts_in(layer) > 0
        return 2 * (self.setup.tensor_parallel > 1) + 2 * to_experts

    @cached_property
    def _flops_per_s(self) -> float:
        """The FLOP/s of a tensor-parallel group."""
        achieved = efficiency(self.cluster, self.shape, self.setup)
        return self.cluster.gpu_flops_per_s * achieved * self.setup.tensor_parallel

    def _computed_s(self, flops: Iterable[float]) -> list[float]:
        """Return the seconds of a micro-batch, from the FLOPs of a sequence."""
        rate, setup = self._flops_per_s, self.setup
        return [setup.microbatch_size * each / rate / setup.context_parallel for each in flops]

    def _recomputed_s(
        self, slower: Sequence[float], sent_s: Iterable[tuple[float, ...]]
    ) -> tuple[float, ...]:
        """Return the recomputation of a backward: layers with collectives, or scores alone."""
        setup = self.setup
        rate = self._flops_per_s * setup.context_parallel
        flops = recomputed_flops(self.shape, setup.recompute, self.split)
        shares = recomputed_shares(self.shape, self.split, self.recompute_layers)
        full = setup.recompute == "full"
        return tuple(
            share * (factor * setup.microbatch_size * each / rate + (sum(s) if full else 0.0))
            for share, factor, each, s in zip(shares, slower, flops, sent_s, strict=True)
        )

    def _tp_sync_s(self) -> tuple[float, ...]:
        """Return TP.sync, which nothing hides.

        Between two nodes NCCL's trees send an all-reduce's bytes once each way, a ring twice.
        """
        t, per_node = self.setup.tensor_parallel, self.cluster.gpus_per_node
        bytes_per_s, _ = self._bandwidths(t, self.setup.num_replicas)
        sync_s = tensor_parallel_bytes(self.shape, self.setup) / bytes_per_s
        if t == 2 * per_node > 2 and not self.setup.sequence_parallel:
            sync_s *= t / (t - 1) / 2
        return tuple(len(layers) * sync_s for layers in self.shape.stage_layers(self.split))

    def _context_s(self) -> tuple[float, ...]:
        """Return the passes of keys and values around a ring; a backward also passes gradients."""
        setup, cluster = self.setup, self.cluster
        bytes_per_s = group_bandwidths(
            (setup.tensor_parallel, setup.context_parallel),
            cluster.gpus_per_node,
            cluster.intra_bytes_per_s,
            cluster.goodput_bytes_per_s,
        )[1]
        sent = context_bytes(self.shape, setup)
        return tuple(b / bytes_per_s for b in self.shape.by_stage(lambda _: sent, self.split))

    def _tokens_s(self) -> tuple[float, ...]:
        """Return the all-to-alls of experts; a backward has as many.

        All GPUs of a node send at once: to experts in the node over the node's own links, and to
        experts of other nodes over the NICs, which all of these GPUs share.
        """
        shared, ranks = self.setup.expert_ranks
        cluster, per_node = self.cluster, self.cluster.gpus_per_node
        peers, here = max(1, ranks - 1), min(ranks, max(1, per_node // shared)) - 1
        byte_s = max(
            here / peers / cluster.intra_bytes_per_s,
            (1 - here / peers) * per_node / cluster.goodput_bytes_per_s,
        )
        sent = self.shape.by_stage(partial(expert_bytes, self.shape, self.setup), self.split)
        return tuple(num_bytes * byte_s for num_bytes in sent)

    def _grad_sync_s(self, num_bytes: float) -> float:
        """Return DP.sync of gradients: an all-reduce or, with a distributed optimizer, to shards.

        Each of several optimizer instances reduce-scatters, and then shards are all-reduced. The
        reduction in 32 bits is an all-to-all: all bytes for other nodes leave a node, while a ring
        would first add them up over the node's replicas.
        """
        setup, n = self.setup, self.setup.num_replicas
        _, bytes_per_s = self._bandwidths(setup.tensor_parallel, n)
        if not setup.distributed_optimizer:
            return all_reduce_s(n, num_bytes, bytes_per_s)
        if (instances := setup.optimizer_instances) > 1:
            near = n // instances
            near_bytes_per_s, far_bytes_per_s = self._instance_bandwidths
            shards_s = all_reduce_s(instances, num_bytes / near, far_bytes_per_s)
            return reduce_scatter_s(near, num_bytes, near_bytes_per_s) + shards_s
        seconds = reduce_scatter_s(n, num_bytes, bytes_per_s)
        return seconds * self._all_to_all_factor if setup.scatters_in_fp32 else seconds

    @property
    def _all_to_all_factor(self) -> float:
        """By which factor an all-to-all takes longer than a reduce-scatter, which is a ring."""
        n, span = self.setup.num_replicas, self._replicas_span
        if span <= self.cluster.gpus_per_node:
            return 1.0
        together = max(1, self.cluster.gpus_per_node * n // span)  # replicas of a node
        return together * (n - together) / max(1, n - 1)

    def sent_shares(self, whole_s: Sequence[float]) -> tuple[float, ...]:
        """Return, by stage, which part of the seconds of whole sums to shards coded ones take.

        They include the time of coding, and are used only if they are faster.
        """
        share = self.setup.summed_share * self._all_to_all_factor
        return tuple(
            min(1.0, share + size / CODED_BYTES_PER_S / seconds) if seconds else 1.0
            for size, seconds in zip(self.synced_bytes, whole_s, strict=True)
        )

    def _expert_sync_s(self, num_bytes: float) -> float:
        """Return DP.sync of experts' gradients, which have fewer replicas, as a ring."""
        setup = self.setup
        collective = reduce_scatter_s if setup.distributed_optimizer else all_reduce_s
        return collective(setup.num_expert_replicas, num_bytes, self._expert_bandwidth)

    def _param_gather_s(self, gradient_bytes: float, of_experts: float) -> float:
        """Return the all-gathers of updated parameters, which only the distributed optimizer has.

        Coded all-gathers include the time of coding, and are used only if they are faster.
        """
        setup = self.setup
        if not setup.distributed_optimizer:
            return 0.0
        smaller = setup.element_bytes / setup.gradient_bytes
        dense, experts = gradient_bytes * smaller, of_experts * smaller
        whole_s = self._gather_s(dense, experts)
        if not setup.gathered_bits:
            return whole_s
        share = setup.gathered_bits / 8 / setup.element_bytes
        coding_s = (dense + experts) / CODED_BYTES_PER_S
        return min(whole_s, coding_s + self._gather_s(share * dense, share * experts))

    def _gather_s(self, dense: float, experts: float) -> float:
        """Return the all-gathers of dense parameters and of experts, from their bytes."""
        setup = self.setup
        d, e = setup.num_replicas, setup.num_expert_replicas
        _, bytes_per_s = self._bandwidths(setup.tensor_parallel, d)
        if setup.optimizer_instances > 1:
            d, bytes_per_s = d // setup.optimizer_instances, self._instance_bandwidths[0]
        dense_s = all_gather_s(d, dense / d, bytes_per_s)
        return dense_s + all_gather_s(e, experts / e, self._expert_bandwidth)

    def _reduced_in_iteration_s(self, num_stages: int) -> tuple[float, ...]:
        """Return DP.sync of tied word embeddings, which is never deferred."""
        seconds = [0.0] * num_stages
        if self.num_ranks > 1 and not self.shape.untied:
            t = self.setup.tensor_parallel
            parameters = self.shape.padded(t).embedding_parameters / t
            seconds[0] = seconds[-1] = self._grad_sync_s(parameters * self.setup.gradient_bytes)
        return tuple(seconds)

    @property
    def _replicas_span(self) -> int:
        """GPUs from the first to the last of a data-parallel group."""
        inside = 1 if self.setup.order == "tp-dp-pp" else self.num_ranks
        return self.setup.tensor_parallel * inside * self.setup.num_replicas

    @property
    def _expert_bandwidth(self) -> float:
        """The bandwidth of a ring over the GPUs with the same experts."""
        return self._bandwidths(*self.setup.expert_ranks, self.setup.num_expert_replicas)[-1]

    @property
    def _instance_bandwidths(self) -> tuple[float, float]:
        """The bandwidths of rings inside an optimizer instance, and across instances."""
        setup, instances = self.setup, self.setup.optimizer_instances
        inside = 1 if setup.order == "tp-dp-pp" else self.num_ranks
        near = inside * setup.num_replicas // instances
        _, here, far = self._bandwidths(setup.tensor_parallel, near, instances)
        return here, far

    def _bandwidths(self, *sizes: int) -> tuple[float, ...]:
        """Return the bandwidths of nested groups, the last of which are replicas (AxoNN eq. 10).

        Pipeline ranks of one node share its NIC only when they use it at the same time, which the
        simulator computes. So they do not count as rings here.
        """
        cluster = self.cluster
        per_node, goodput = cluster.gpus_per_node, cluster.goodput_bytes_per_s
        *inner, replicas = group_bandwidths(sizes, per_node, cluster.intra_bytes_per_s, goodput)
        rings = prod(sizes[:-1])
        if self.setup.order == "tp-pp-dp":
            if self._replicas_span > per_node:
                replicas = goodput / min(per_node, rings)
            rings *= self.num_ranks
        if rings < per_node < rings * sizes[-1] and cluster.nics < per_node:
            replicas /= cluster.nics  # a ring over several GPUs of a node uses one NIC
        return (*inner, replicas)
