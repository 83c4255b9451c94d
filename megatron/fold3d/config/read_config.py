"""From Megatron's namespace to a checked `Fold3DConfig`: `read_config`.

Nothing in this room imports torch or Megatron, touches a device or makes a process group. So a run
that cannot work ends here, within milliseconds, and gets all reasons at once.
"""

import math
from argparse import Namespace

from megatron.fold3d.config.backward_share_flags import (
    first_share,
    measures_shares,
    share_problems,
)
from megatron.fold3d.config.bucket_flags import (
    cuts_every_segment,
    gathers_by_plan,
    has_one_queue,
    place_problems,
    reduces_early,
    slices_dp_sync,
)
from megatron.fold3d.config.fold3d_config import Device, Fold3DConfig
from megatron.fold3d.config.job_sizes import size_problems
from megatron.fold3d.config.nccl_settings import launch_problems, traffic_class_problems
from megatron.fold3d.config.offload_flags import offloads_everything, saved_bytes
from megatron.fold3d.config.recompute_flags import recompute_count_problems, recomputes_means
from megatron.fold3d.config.refusals import may_defer, may_try, refusals, unknown_segments
from megatron.fold3d.config.replication_flags import given_segments, ties_embeddings
from megatron.fold3d.config.schedule_flags import (
    group_of,
    schedule_of,
    schedule_problems,
    with_plan,
    written_out,
)
from megatron.fold3d.config.segment_flags import num_segments, segment_problems
from megatron.fold3d.config.trace_flags import iterations, records_tp_sync, trace_problems
from megatron.fold3d.config.weight_grad_flags import split_segments
from megatron.fold3d.plan.ir import stages_of
from megatron.fold3d.plan.passes.transfers import RECEIVES_AHEAD
from megatron.fold3d.plan.schedule_word import AUTO

# A slice has to take much longer than its launch, and much less than an activation's transfer.
SLICE_BYTES: dict[Device, int] = {"cuda": 8 << 20, "cpu": 1 << 19}
_DRAWS = ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps", "fp8", "fp4")


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
    args = written_out(with_plan(args) if args.plan_file else args, segments)
    problems = [
        *schedule_problems(args, schedule),
        *segment_problems(args, schedule, segments),
        *refusals(args),
        *unknown_segments(args, segments),
        *share_problems(args),
        *place_problems(args, segments),
        *recompute_count_problems(args, segments),
        *trace_problems(args),
        *launch_problems(args),
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
        auto_defers=may_defer(args),
        auto_delays=may_try(args, "wgrad=gaps"),
        auto_replicates=args.replicate_optimizer == AUTO or may_try(args, "optimizer=auto"),
        keeps_forwards=schedule == AUTO and any(getattr(args, name, None) for name in _DRAWS),
        keeps_sums=schedule == AUTO and bool(getattr(args, "deterministic_mode", False)),
        preemptive_comm=args.preemptive_comm,
        pp_traffic_class=args.traffic_class.get("pp"),
        dp_traffic_class=args.traffic_class.get("dp"),
        saved_bytes=saved_bytes(args, segments),
    )


def _parameter_share(args: Namespace) -> float:
    is_small = args.bf16 or args.fp16
    return 0.5 if is_small and args.accumulate_allreduce_grads_in_fp32 else 1.0


def _clips_or_scales(args: Namespace) -> bool:
    # Megatron 0.19.2 has no flag for the threshold; an attribute set in another way is obeyed.
    skips = math.isfinite(getattr(args, "grad_norm_skip_threshold", math.inf))
    return bool(args.clip_grad > 0 or skips or args.fp16 or args.loss_scale)
