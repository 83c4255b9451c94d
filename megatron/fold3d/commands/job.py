"""Turns the namespace of a training's flags into the run that is predicted.

The namespace comes from words, or from Megatron's validation. `fold3d simulate`, `plan` and
``--check`` all come here, so candidates are made in one place and by the rules of `config`.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

from megatron.fold3d.commands.cost_sources import CostsOf
from megatron.fold3d.commands.megatron_flags import (
    Described,
    layers_of,
    precision_of,
    recompute_of,
)
from megatron.fold3d.commands.training_flags import layout_of
from megatron.fold3d.commands.training_words import not_counted
from megatron.fold3d.config.all_flags import megatron_defaults
from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.job_sizes import (
    num_microbatches,
    ranks_of_model,
    stage_layers,
    uneven_ranks,
)
from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.config.refusals import coded
from megatron.fold3d.config.run_flags import stock_group_problems
from megatron.fold3d.config.schedule_flags import word_of
from megatron.fold3d.config.segment_flags import MEASURES
from megatron.fold3d.plan.choice import file_of, stock_schedule
from megatron.fold3d.plan.files import read_plan
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.policy.partition import layers_of_stages
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.coded_sync import Codes, coded_bits, summed_bits
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.settled import PredictedRun


def run_of(
    args: Namespace,
    config: Fold3DConfig,
    estimate: CostsOf,
    shape: ModelShape | None = None,
    cluster: Cluster | None = None,
) -> PredictedRun:
    """Return the run that flags describe, to be predicted.

    Args:
        args: Megatron's namespace, with the number of replicas and the batch.
        cluster: limits the memory that the run may hold, if it is known.

    Raises:
        PlanError: the user's file holds no plan.
    """
    choice, word = config.choice, word_of(args)
    if config.plan_file or choice.order == AUTO:
        choice = replace(choice, order=stock_schedule(config.num_segments))
    if choice.group == config.num_ranks:  # as without it
        choice = replace(choice, group=None)
    candidate = Candidate(
        choice=choice,
        setup=setup_of(args, args.data_parallel_size, cluster),
        num_ranks=config.num_ranks,
        num_microbatches=num_microbatches(args, args.data_parallel_size),
        layers=stage_layers(args) if args.num_layers else (),
        recompute_layers=config.recompute_layers or (),
        offload=config.offload_activations != "off",
        preemptive=config.preemptive_comm,
        shards=args.shard_segments,
        combined=args.overlap_moe_expert_parallel_comm,
        aligned=args.align_grad_reduce,
    )
    job = replace(
        config.job,
        num_microbatches=candidate.num_microbatches,
        order=read_plan(config.plan_file) if config.plan_file else None,
    )
    candidate = replace(candidate, flags=job)
    if candidate.is_stock:
        candidate = as_run(
            candidate,
            overlaps=config.job.grad_sync != "serial",
            gathers=config.job.gathers_params,
        )
    return PredictedRun(
        candidate=candidate,
        estimate=estimate,
        shape=shape,
        usable_bytes=None if cluster is None else cluster.usable_bytes,
        auto_layers=getattr(args, "layers", None) == AUTO,
        auto_recompute_layers=config.auto_recompute_layers,
        auto_ahead="ahead" in config.auto,
        auto_replicated=word.value("optimizer") == AUTO,
        tied=config.ties_embeddings,
    )


def as_run(candidate: Candidate, *, overlaps: bool, gathers: bool) -> Candidate:
    """Return a run of stock that overlaps as its flags say; `search` prints all such flags.

    Args:
        overlaps: whether its gradients are reduced beside backwards.
        gathers: whether parameters of a distributed optimizer are gathered beside forwards.
    """
    job = replace(candidate, flags=None).job
    job = replace(job, gathers_params=job.gathers_params and gathers)
    return replace(candidate, flags=job if overlaps else replace(job, grad_sync="serial"))


def config_of(said: Described, hardware: Cluster | None = None) -> Fold3DConfig:
    """Set what Megatron's validation derives from flags; returns the configuration.

    Args:
        said: the flags, whose namespace changes.
        hardware: the cluster, whose GPUs are all used; without it ``--dp`` gives the replicas.

    Raises:
        ValueError: a rule is broken, or sizes do not fit each other.
    """
    args = said.args
    if args.segments == AUTO:
        raise ValueError(f"--segments auto: {MEASURES}")
    if (file := file_of(word_of(args).order)) is not None:
        _take_sizes(args, read_plan(file))
    if args.layers == AUTO and said.shape is not None:
        args.pipeline_model_parallel_layout = layout_of(_even(args, said.shape.num_layers))
    args.micro_batch_size = 1 if args.micro_batch_size is None else args.micro_batch_size
    read_config(args)  # which refuses sizes below one
    for name, value in megatron_defaults(args).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.data_parallel_size = _replicas(args, hardware)
    of_all = args.micro_batch_size * args.data_parallel_size
    if None not in (said.typed.microbatches, said.typed.global_batch_size):
        raise ValueError("--microbatches with --global-batch-size: both say the batch; drop one")
    if args.microbatches is not None:
        args.global_batch_size = args.microbatches * of_all
    if args.global_batch_size is None:
        raise ValueError("no batch: give --global-batch-size, or --microbatches in place of it")
    if args.global_batch_size % of_all:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} with --micro-batch-size "
            f"{args.micro_batch_size} on {args.data_parallel_size} replicas: each computes equally "
            f"many micro-batches; give a multiple of {of_all}"
        )
    if problems := [*stock_group_problems(args, args.data_parallel_size)]:
        raise ValueError("\n".join(problems))
    config = read_config(args)
    args.virtual_pipeline_model_parallel_size = config.num_segments
    layers = stage_layers(args) if said.shape is not None else ()
    if layers and min(layers) < 0:
        raise ValueError(uneven_ranks(args))
    if said.shape is not None and sum(layers) != said.shape.num_layers:
        raise ValueError(
            f"found stages with {','.join(map(str, layers))} layers; together they are the "
            f"{said.shape.num_layers} layers of {said.shape.name}; give sizes that divide these, "
            "or --layers, which is --pipeline-model-parallel-layout in a training"
        )
    return config


def default_queues(args: Namespace, hardware: Cluster | None) -> int:
    """Return what CUDA_DEVICE_MAX_CONNECTIONS will be: one queue where Megatron demands it."""
    shares = max(args.tensor_model_parallel_size, args.context_parallel_size) > 1
    return 1 if hardware is not None and shares and not hardware.is_blackwell else 8


def _take_sizes(args: Namespace, plan: Plan) -> None:
    """Set the sizes of a plan file.

    Raises:
        ValueError: flags contradict them.
    """
    for short, name, size in (
        ("pp", "pipeline_model_parallel_size", plan.num_ranks),
        ("segments", "segments", plan.num_segments),
        ("microbatches", "microbatches", plan.num_microbatches),
    ):
        if getattr(args, short) not in (None, size):
            raise ValueError(
                f"--{short} {getattr(args, short)} with --schedule {word_of(args).order}: the plan "
                f"has {size}; drop --{short}"
            )
        if short != "microbatches" or args.global_batch_size is None:
            setattr(args, name, size)


def _even(args: Namespace, num_layers: int) -> tuple[int, ...]:
    ranks, segments = args.pipeline_model_parallel_size, args.segments or 1
    if num_layers < ranks * segments:
        raise ValueError(
            f"--layers auto: {num_layers} layers are fewer than {ranks} ranks x {segments} "
            "segments; give fewer segments"
        )
    return layers_of_stages(num_layers, ranks, segments)


def _replicas(args: Namespace, hardware: Cluster | None) -> int:
    model = ranks_of_model(args)
    if hardware is None:
        return int(args.dp or (1 if args.microbatches is None else 2))
    replicas, rest = divmod(hardware.num_gpus, model)
    if rest or args.dp not in (None, replicas):
        found = f" x {args.dp} replicas" if args.dp is not None else ""
        fix = f"give --dp {replicas}" if not rest else "give sizes that divide these"
        raise ValueError(
            f"the flags take {model} GPUs for a model{found}, and {hardware.name} has "
            f"{hardware.num_gpus}; {fix}, or another cluster"
        )
    return replicas


def setup_of(args: Namespace, data_parallel: int, cluster: Cluster | None = None) -> Setup:
    """Return the setup that flags describe, from Megatron's namespace."""
    layers = layers_of(args, cluster)
    setup = Setup(
        tensor_parallel=args.tensor_model_parallel_size,
        data_parallel=data_parallel,
        microbatch_size=args.micro_batch_size,
        sequence_parallel=args.sequence_parallel,
        distributed_optimizer=args.use_distributed_optimizer,
        optimizer_instances=args.num_distributed_optimizer_instances,
        recompute=recompute_of(args, layers),
        context_parallel=args.context_parallel_size,
        expert_parallel=args.expert_model_parallel_size,
        expert_tensor_parallel=(args.num_experts and args.expert_tensor_parallel_size) or 0,
        order="tp-pp-dp" if args.use_tp_pp_dp_mapping else "tp-dp-pp",
        gathered_bits=0.0 if coded(args, "delta_param_gather") == "off" else _gathered_bits(args),
        **layers,
        **precision_of(args),
    )
    if coded(args, "coded_grad_reduce") == "off":
        return setup
    added = num_microbatches(args, data_parallel) if _is_unfused(args) else None
    return replace(setup, summed_bits=summed_bits(setup.gradient_bytes, added))


_LEARNING_RATE, _DEVIATION = 1e-4, 0.02  # where no flag says them


def _gathered_bits(args: Namespace) -> float:
    return coded_bits(args.lr or _LEARNING_RATE, args.init_method_std or _DEVIATION)


def _is_unfused(args: Namespace) -> bool:
    """Tell whether bf16 gradients are added up outside of matmuls, so that sums end in zeros."""
    return bool(args.bf16 and not (args.fp16 or args.gradient_accumulation_fusion))


def codes_of(args: Namespace, cluster: Cluster) -> Codes:
    """Return what a training may code: what its flags do not rule out.

    The optimizer rules nothing out, since a search chooses it. GPUs without bf16 train in fp16.
    """
    names = "delta_param_gather", "coded_grad_reduce"
    asked = {name: getattr(args, name) or "auto" for name in names}
    chosen = {"use_distributed_optimizer": True, "fp16": args.fp16 or not cluster.has_bf16}
    sharded = Namespace(**vars(args) | asked | chosen)
    gathers, sums = (coded(sharded, name) != "off" for name in names)
    return Codes(_gathered_bits(args) if gathers else 0.0, sums, _is_unfused(sharded))


def left_out(args: Namespace) -> Iterator[str]:
    """Yield the flags that change memory or time, and that a prediction ignores."""
    by_groups = args.recompute_granularity == "full" and args.recompute_layers is None
    flags = {
        "--recompute-num-layers": by_groups and (args.recompute_num_layers or 1) != 1,
        "--recompute-modules": args.recompute_granularity == "selective"
        and args.recompute_modules not in (None, ["core_attn"]),
        "--lazy-inter-segment": args.lazy_inter_segment,
        "--num-distributed-optimizer-instances": args.num_distributed_optimizer_instances > 1
        and bool(args.num_experts),
        "--optimizer-cpu-offload": args.optimizer_cpu_offload,
        "--fp8-format": args.fp8 is not None,
        "--fp4-format": args.fp4 is not None,
        "--optimizer": args.optimizer != "adam",
    }
    yield from (flag for flag, given in flags.items() if given)
    yield from not_counted(args)
