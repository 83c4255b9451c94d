"""Our flags: added to Megatron's parser, and read back into a `Fold3DConfig`.

Each feature's file has its flags, their meaning and the options that they exclude; this file
combines them. Nothing in this room imports torch or Megatron, touches a device or makes a process
group. So a run that cannot work ends here, within milliseconds, and gets all reasons at once.
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import Any, get_args

from megatron.fold3d.config.auto_schedule_flags import (
    auto_schedule_problems,
    keeps_forwards,
    keeps_sums,
    may_defer,
    may_delay,
    may_replicate,
)
from megatron.fold3d.config.backward_share_flags import (
    first_share,
    measures_shares,
    share_problems,
)
from megatron.fold3d.config.bucket_flags import (
    cuts_every_segment,
    gathers_by_plan,
    has_one_queue,
    reduces_early,
)
from megatron.fold3d.config.dp_slice_flags import dp_slice_problems, slices_dp_sync
from megatron.fold3d.config.fold3d_config import Device, Fold3DConfig
from megatron.fold3d.config.minimum_sizes import size_problems
from megatron.fold3d.config.nccl_settings import add_traffic_class_flags, traffic_class_problems
from megatron.fold3d.config.offload_flags import (
    add_offload_flags,
    offload_problems,
    offloads_everything,
    saved_bytes,
)
from megatron.fold3d.config.preemption_flags import add_preemption_flags, preemption_problems
from megatron.fold3d.config.recompute_flags import (
    add_recompute_flags,
    recompute_problems,
    recomputes_means,
)
from megatron.fold3d.config.refusals import refusals
from megatron.fold3d.config.replication_flags import (
    given_segments,
    replication_problems,
    ties_embeddings,
)
from megatron.fold3d.config.retired_flags import add_retired_flags
from megatron.fold3d.config.schedule_flags import (
    add_schedule_flags,
    group_of,
    schedule_of,
    schedule_problems,
    with_plan,
    written_out,
)
from megatron.fold3d.config.segment_flags import (
    add_segment_flags,
    num_segments,
    segment_problems,
    virtual_stage_flag,
)
from megatron.fold3d.config.shard_flags import add_shard_flags, shard_problems
from megatron.fold3d.config.trace_flags import (
    add_trace_flags,
    iterations,
    records_tp_sync,
    trace_problems,
)
from megatron.fold3d.config.weight_grad_flags import (
    place_problems,
    split_segments,
    weight_grad_problems,
)
from megatron.fold3d.plan.ir import stages_of
from megatron.fold3d.plan.passes.transfers import RECEIVES_AHEAD
from megatron.fold3d.plan.schedule_word import AUTO

# A slice has to take much longer than its launch, and much less than an activation's transfer.
SLICE_BYTES: dict[Device, int] = {"cuda": 8 << 20, "cpu": 1 << 19}

_FLAGS_OF_FEATURES = (
    add_schedule_flags,
    add_segment_flags,
    add_recompute_flags,
    add_shard_flags,
    add_preemption_flags,
    add_offload_flags,
    add_traffic_class_flags,
    add_trace_flags,
    add_retired_flags,
)


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags to Megatron's parser: the ``extra_args_provider`` of ``parse_args``."""
    group = parser.add_argument_group("FOLD3D")
    for add_flags in _FLAGS_OF_FEATURES:
        add_flags(group)
    group.add_argument(
        "--model-preset",
        metavar="NAME",
        help="Build a model of the paper, such as gpt3-18b, or any layers-hidden-heads[-sequence]: "
        "stands for the flags of its shape; flags that are given override it.",
    )
    group.add_argument(
        "--device",
        choices=get_args(Device),
        default="cuda",
        help="Train on GPUs over NCCL, or on CPUs over gloo (default: cuda).",
    )
    group.add_argument(
        "--check",
        nargs="?",
        const="",
        metavar="CLUSTER",
        help="Check the flags, print the plan and an estimate of the memory, and exit: 0 if the "
        "run can begin, 2 if not. Needs no GPU and no torchrun. With a cluster as a100x128-200g, "
        "or a file of `fold3d doctor --write-cluster`, also predict the time of an iteration.",
    )
    return parser


def megatron_defaults(args: Namespace) -> dict[str, Any]:
    """Return the values that our flags give to Megatron's: the ``args_defaults`` of its parser."""
    defaults: dict[str, Any] = {}
    if args.segments not in (None, AUTO) and not virtual_stage_flag(args):
        defaults["num_virtual_stages_per_pipeline_rank"] = args.segments
    if args.schedule_group is not None:
        defaults["microbatch_group_size_per_vp_stage"] = args.schedule_group
    if args.recompute_layers is not None:
        defaults |= {"recompute_granularity": "full", "recompute_method": "block"}
        auto = args.recompute_layers == AUTO
        defaults["recompute_num_layers"] = 1 if auto else max(1, *args.recompute_layers)
    return defaults


def read_config(args: Namespace) -> Fold3DConfig:
    """Read Megatron's namespace, as parsed or as validated, and refuse options that cannot work.

    Raises:
        ValueError: one line for each rule that is broken.
    """
    if not hasattr(args, "schedule"):
        raise ValueError(
            "--yaml-cfg: Megatron then ignores the command line and with it --schedule, "
            "--segments and --device; give the options as flags"
        )
    if problems := [*size_problems(args)]:  # the other rules divide by these sizes
        raise ValueError("\n".join(problems))
    schedule, segments = schedule_of(args), num_segments(args)
    args = with_plan(args) if args.plan_file else written_out(args, segments)
    problems = [
        *schedule_problems(args, schedule),
        *auto_schedule_problems(args, schedule),
        *segment_problems(args, schedule, segments),
        *refusals(args, schedule),
        *share_problems(args, schedule),
        *shard_problems(args, schedule),
        *replication_problems(args, schedule, segments),
        *dp_slice_problems(args, schedule),
        *offload_problems(args, schedule, segments),
        *weight_grad_problems(args, schedule, segments),
        *place_problems(args, schedule, segments),
        *recompute_problems(args, schedule, segments),
        *_pair_problems(args, schedule),
        *_recompute_count_problems(args, schedule, segments),
        *trace_problems(args, schedule),
        *preemption_problems(args, schedule),
        *traffic_class_problems(args),
    ]
    if problems:
        raise ValueError("\n".join(problems))
    return Fold3DConfig(
        schedule=schedule,
        plan_file=args.plan_file,
        num_ranks=args.pipeline_model_parallel_size,
        num_segments=segments,
        device=args.device,
        microbatch_group_size=group_of(args),
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        backward_share=first_share(args),
        auto_share=measures_shares(args),
        dp_slice_bytes=args.dp_slice_bytes or SLICE_BYTES[args.device],
        auto_slices=args.dp_slice_bytes is None,
        delay_weight_grads=split_segments(args, schedule, segments),
        behind_backwards=args.behind_backwards,
        has_engine_modules=args.transformer_impl == "transformer_engine",
        forwards_ahead=None if args.forwards_ahead == AUTO else args.forwards_ahead,
        auto_ahead=args.forwards_ahead == AUTO,
        auto_weight_grads=args.delay_weight_grads == AUTO,
        most_activations=args.most_activations,
        recompute_early=stages_of(args.recompute_early, args.pipeline_model_parallel_size),
        recompute_layers=None if args.recompute_layers == AUTO else args.recompute_layers,
        auto_recompute_layers=args.recompute_layers == AUTO,
        recomputes_means=recomputes_means(args),
        activation_memory_bytes=args.activation_memory_bytes,
        overlap_tensor_parallel=args.overlap_tensor_parallel,
        overlap_grad_reduce=args.overlap_grad_reduce,
        parameter_share=_parameter_share(args),
        clips_or_scales=_clips_or_scales(args),
        trace=args.trace,
        trace_iterations=iterations(args.trace_iterations),
        records_tp_sync=records_tp_sync(args),
        offload_activations=args.offload_activations,
        lazy_inter_segment=args.lazy_inter_segment,
        offload_everything=offloads_everything(args),
        cuts_every_segment=cuts_every_segment(args),
        slices_dp_sync=slices_dp_sync(args),
        reduces_early=reduces_early(args),
        receives_late=has_one_queue(args),
        receives_ahead=RECEIVES_AHEAD if args.device == "cpu" else 1,
        steps_shards=bool(args.use_distributed_optimizer),
        gathers_params=gathers_by_plan(args),
        shards_params=args.shard_segments != "off",
        shards_grads=args.shard_segments == "gradients",
        replicated_segments=given_segments(args),
        ties_embeddings=ties_embeddings(args),
        auto_defers=may_defer(args, schedule),
        auto_delays=may_delay(args, schedule, segments),
        auto_replicates=args.replicate_optimizer == AUTO or may_replicate(args, schedule, segments),
        keeps_forwards=schedule == "auto" and keeps_forwards(args),
        keeps_sums=schedule == "auto" and keeps_sums(args),
        preemptive_comm=args.preemptive_comm,
        pp_traffic_class=args.pp_traffic_class,
        dp_traffic_class=args.dp_traffic_class,
        saved_bytes=saved_bytes(args, segments),
    )


def _pair_problems(args: Namespace, schedule: str) -> Iterable[str]:
    if not args.overlap_tensor_parallel:
        return ()

    from megatron.fold3d.config.pair_flags import pair_problems

    return pair_problems(args, schedule)


def _recompute_count_problems(args: Namespace, schedule: str, num_segments: int) -> Iterable[str]:
    if args.recompute_layers is None and args.activation_memory_bytes is None:
        return ()

    from megatron.fold3d.config.recompute_count_flags import recompute_count_problems

    num_ranks = args.pipeline_model_parallel_size
    return recompute_count_problems(args, schedule, num_ranks, num_segments)


def _parameter_share(args: Namespace) -> float:
    is_small = args.bf16 or args.fp16
    return 0.5 if is_small and args.accumulate_allreduce_grads_in_fp32 else 1.0


def _clips_or_scales(args: Namespace) -> bool:
    # Megatron 0.19.2 has no flag for the threshold; an attribute set in another way is obeyed.
    skips = math.isfinite(getattr(args, "grad_norm_skip_threshold", math.inf))
    return bool(args.clip_grad > 0 or skips or args.fp16 or args.loss_scale)
