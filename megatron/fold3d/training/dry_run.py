"""``--check``: describes a run with its memory and time, without a GPU and without building it.

The same functions refuse options here and in training; this file adds the planner's estimates. If
an estimate is not possible, the check still succeeds; it fails if the model exceeds its GPUs.
"""

import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.fold3d.commands.auto_options import lines as lines_of_auto
from megatron.fold3d.commands.console import counted
from megatron.fold3d.commands.megatron_flags import shape_of
from megatron.fold3d.commands.plan_source import in_words
from megatron.fold3d.config.bucket_flags import has_one_queue
from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.gpu_settings import has_many_queues
from megatron.fold3d.config.job_sizes import num_microbatches, ranks_of_model
from megatron.fold3d.observe.exposure import exposure, mean
from megatron.fold3d.observe.memory_curve import memory
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.ops import COMPUTE_OPS, COPY_OPS
from megatron.fold3d.plan.passes.recompute import recompute_early
from megatron.fold3d.policy.run_choice import RunChoice, stock_schedule
from megatron.fold3d.predict.cost_model.cluster import NODES, Cluster, cluster
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.sharded_footprint import sharded_footprint
from megatron.fold3d.predict.cost_model.sizes import replicated_bytes
from megatron.fold3d.predict.search.candidate_estimate import estimate_of
from megatron.fold3d.predict.search.candidate_timeline import order_of, plan_of, timeline_of
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.choice_search import ChoiceSearch, Predicted, Scope
from megatron.fold3d.predict.search.order_choice import held_sizes
from megatron.fold3d.predict.search.planner import USABLE_MEMORY
from megatron.fold3d.training.trained_setup import setup_of, stage_layers

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Target:
    """The cluster that a run is checked for.

    Attributes:
        cluster: the GPUs that it will have; None if they are not known.
    """

    cluster: Cluster | None

    @classmethod
    def named(cls, name: str) -> "Target":
        """Return the target that ``--check`` names; an empty name is no cluster.

        Raises:
            ValueError: there is no cluster of this name.
            OSError: its file cannot be read.
        """
        return cls(cluster(name) if name else None)

    @property
    def is_blackwell(self) -> bool:
        """Whether its GPUs are Blackwell or later; unknown ones count as older."""
        return self.cluster is not None and self.cluster.is_blackwell

    def set_world_size(self, args: Namespace) -> None:
        """Set the number of ranks in the namespace and in the environment.

        It is torchrun's, or the cluster's, or the number that one replica of the model takes.

        Raises:
            ValueError: torchrun and the cluster differ.
        """
        started, cluster = os.environ.get("WORLD_SIZE"), self.cluster
        if cluster is not None and started not in (None, str(cluster.num_gpus)):
            raise ValueError(
                f"--check {cluster.name}: it has {cluster.num_gpus} GPUs, and this job {started} "
                "ranks; check without torchrun, or name as many"
            )
        if cluster is not None:
            args.world_size = cluster.num_gpus
        elif started is None:
            args.world_size = ranks_of_model(args)
        os.environ["WORLD_SIZE"] = str(args.world_size)


def report(args: Namespace, plan: Plan | None) -> Iterator[str]:
    """Yield lines that describe a run that can begin, with the planner's estimates.

    Args:
        args: Megatron's namespace, validated.
        plan: the plan of an iteration; None for stock Megatron's schedule.

    Raises:
        ValueError: the model does not fit into the cluster's GPUs.
    """
    sizes = {
        "dp": args.data_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "tp": args.tensor_model_parallel_size,
        "cp": args.context_parallel_size,
        "ep": args.expert_model_parallel_size,
    }
    split = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name == "dp")
    yield f"can begin: {counted(args.world_size, 'ranks')}, {split}"
    if plan is None:
        yield "plan: stock Megatron's schedule"
    else:
        shape = in_words(plan.num_ranks, plan.num_segments, plan.num_microbatches)
        begins = " begins in stock's order" if args.schedule == "auto" else ""
        yield f"plan: {args.plan_file or args.schedule}{begins}, {shape}, verified"
    target = Target.named(args.check)
    try:
        expected = RunEstimate.of(args, plan, target)
    except ValueError as error:  # of the planner; the run does not ask it
        yield f"no estimate of memory and time: {error}"
        return
    yield from expected.lines(target)


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """The planner's estimate of a run."""

    iteration_s: float
    peaks: tuple[float, ...]
    exposed: str
    notes: tuple[str, ...]
    auto: tuple[Predicted, ...] = ()
    """With --schedule auto: stock's order, and what it would try."""

    @classmethod
    def of(cls, args: Namespace, plan: Plan | None, target: Target) -> "RunEstimate":
        """Return the estimate of Megatron's validated namespace.

        Args:
            args: the namespace.
            plan: the plan of an iteration; None for stock Megatron's schedule.
            target: the cluster, if one is named.

        Raises:
            ValueError: the planner does not model it.
        """
        if args.use_torch_fsdp2 or args.use_megatron_fsdp:
            raise ValueError("the planner does not model FSDP, whose replicas share all states")
        candidate = _candidate(args)
        known = estimate_of(
            shape_of(args), target.cluster or _some_cluster(args.world_size), candidate
        )
        if has_many_queues():
            known = replace(known, cuda_connections=None)
        order = _order(args, candidate, plan)
        timeline = timeline_of(candidate, known, order=order)
        footprint = known.footprint
        if candidate.shards != "off":
            freeing = plan_of(candidate, order)
            footprint = sharded_footprint(footprint, freeing, known.gradient_bytes, candidate.setup)
        row = mean(exposure(timeline))
        parts = {"bubble": row.bubble_s, "DP.sync": row.grad_sync_s, "PP.sync": row.p2p_s}
        return cls(
            timeline.period_s,
            tuple(rank.device.peak_bytes for rank in memory(timeline, footprint)),
            ", ".join(f"{name} {row.share(seconds):.0%}" for name, seconds in parts.items()),
            tuple(_left_out(args)),
            _tried(args, known, candidate) if target.cluster and args.schedule == "auto" else (),
        )

    def lines(self, target: Target) -> Iterator[str]:
        """Yield the estimate in words.

        Raises:
            ValueError: it is more than the GPUs have.
        """
        known, most = target.cluster, max(self.peaks)
        peaks = " ".join(f"{peak / _GIB:.1f}" for peak in self.peaks)
        yield f"memory: {peaks} GiB per pipeline rank, estimated"
        if known is None:
            yield "no prediction of time; --check CLUSTER, such as a100x128-200g, adds one"
        else:
            limit = known.gpu_memory_bytes
            if most > limit:
                raise ValueError(
                    f"--check {known.name}: pipeline rank {self.peaks.index(most)} would hold "
                    f"{most / _GIB:.1f} GiB, and a GPU has {limit / _GIB:.0f}; `fold3d search` "
                    "finds sizes that fit"
                )
            if most > USABLE_MEMORY * limit:
                yield (
                    f"  little is left of {limit / _GIB:.0f} GiB for CUDA, NCCL and the allocator"
                )
            yield f"iteration: {self.iteration_s:.3f} s on {known.name}, predicted: {self.exposed}"
        if self.auto:
            stock, *tried = self.auto
            yield "--schedule auto measures, and is then predicted to try:"
            yield from (f"  {line}" for line in lines_of_auto(stock, tried))
        if self.notes:
            yield f"not in these estimates: {', '.join(self.notes)}"


def _candidate(args: Namespace) -> Candidate:
    config = Fold3DConfig.from_args(args)
    is_stock = config.schedule == "stock"
    schedule = config.schedule
    if is_stock or config.plan_file or schedule == "auto":
        schedule = stock_schedule(config.num_segments)
    return Candidate(
        schedule=schedule,
        is_stock=is_stock,
        setup=setup_of(args, args.data_parallel_size),
        num_ranks=config.num_ranks,
        num_segments=config.num_segments,
        num_microbatches=num_microbatches(args),
        group_size=config.microbatch_group_size if schedule == "interleaved" else None,
        layers=stage_layers(args),
        backward_share="auto" if config.auto_share else config.backward_share,
        offload=config.offload_activations != "off",
        preemptive=config.preemptive_comm,
        forwards_ahead=config.forwards_ahead,
        places_weight_grads=config.auto_weight_grads,
        delayed_weight_grads=() if config.auto_weight_grads else config.delay_weight_grads,
        behind_backwards=config.behind_backwards,
        sums_last=not config.overlap_grad_reduce,
        reduces_early=config.reduces_early,
        replicated=config.replicated_segments,
        shards=args.shard_segments,
        recompute_layers=config.recompute_layers or (),
        recompute_early=bool(config.recompute_early),
        overlap_tensor_parallel=config.overlap_tensor_parallel,
    )


def _tried(args: Namespace, known: Estimate, candidate: Candidate) -> tuple[Predicted, ...]:
    """Return what ``--schedule auto`` is predicted to try, behind stock's order."""
    config = Fold3DConfig.from_args(args)
    cuts = config.may_cut_sums(args.data_parallel_size)
    memory_bytes = USABLE_MEMORY * cluster(args.check).gpu_memory_bytes

    def fits(choice: RunChoice, plan: Plan) -> bool:
        held = held_sizes(known.footprint, plan, memory_bytes)
        more = replicated_bytes(
            shape_of(args),
            candidate.setup,
            plan.num_ranks,
            stage_layers(args),
            choice.replicated_stages,
        )
        ranks = zip(held.peaks(plan), more, held.most, strict=True)
        return all(peak + extra <= most for peak, extra, most in ranks)

    search = ChoiceSearch(
        num_ranks=config.num_ranks,
        num_segments=config.num_segments,
        num_microbatches=candidate.num_microbatches,
        costs=known.costs,
        scope=Scope(
            defers=config.auto_defers and cuts,
            delays=config.auto_delays,
            replicates=config.auto_replicates and cuts,
            gathers=config.gathers_params,
            reduces_early=config.reduces_early,
            tied=config.ties_embeddings,
            keeps_forwards=config.keeps_forwards,
        ),
        group_size=config.microbatch_group_size,
        fits=fits,
        held=lambda plan: held_sizes(known.footprint, plan, memory_bytes),
        nic_of_rank=known.nic_of_rank,
        routes=known.routes,
        shard_shares=known.shard_shares,
    )
    return search.stock, *search.to_try()


def _order(args: Namespace, candidate: Candidate, plan: Plan | None) -> Plan | None:
    """Return the order that runs, where the candidate does not say it: a file's, for example."""
    if plan is not None and args.plan_file:
        return plan.select(COMPUTE_OPS | COPY_OPS)
    if not candidate.recompute_early:
        return None
    stages = Fold3DConfig.from_args(args).recompute_early  # may be some of them
    order = order_of(replace(candidate, recompute_early=False))
    return recompute_early(order, stages, in_pairs=candidate.overlap_tensor_parallel)


def _left_out(args: Namespace) -> Iterator[str]:
    """Yield flags that change memory or time, and that the estimates ignore."""
    full = args.recompute_granularity == "full"
    flags = {
        "--recompute-num-layers": full and args.recompute_num_layers != 1,
        "--recompute-modules": args.recompute_granularity == "selective"
        and args.recompute_modules not in (None, ["core_attn"]),
        "--recompute-layers auto": args.recompute_layers == "auto",
        "optimizer=auto": args.replicate_optimizer == "auto",
        "--lazy-inter-segment": args.lazy_inter_segment,
        "ahead=auto": args.forwards_ahead == "auto",
        "--num-distributed-optimizer-instances": args.num_distributed_optimizer_instances > 1,
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "one hardware queue": args.tensor_model_parallel_size == 1 and has_one_queue(args),
        "no --overlap-param-gather": args.use_distributed_optimizer
        and args.data_parallel_size > 1
        and not args.overlap_param_gather,
        "--fp8-format": args.fp8 is not None,
        "--optimizer": args.optimizer != "adam",
    }
    return (flag for flag, given in flags.items() if given)


def _some_cluster(num_gpus: int) -> Cluster:
    """Return GPUs for which memory, which does not depend on theirs, is estimated."""
    return replace(NODES["a100"], num_nodes=num_gpus, gpus_per_node=1)
