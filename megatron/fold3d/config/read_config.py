"""From Megatron's namespace to a checked `Fold3DConfig`: `read_config`.

Nothing in this folder imports torch or Megatron, touches a device or makes a process group. So a
run that cannot work ends here within milliseconds, with all reasons at once.
"""

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace

from megatron.fold3d.config.bucket_flags import (
    cuts_every_segment,
    has_one_queue,
    place_problems,
    reduces_early,
    slices_dp_sync,
)
from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.gpu_settings import launch_problems, traffic_class_problems
from megatron.fold3d.config.job_sizes import num_replicas, size_problems
from megatron.fold3d.config.recompute_flags import (
    offloads_everything,
    recompute_count_problems,
    recomputes_means,
    saved_bytes,
)
from megatron.fold3d.config.refusals import (
    coded,
    may_defer,
    may_try,
    refusals,
    unknown_segments,
)
from megatron.fold3d.config.schedule_flags import (
    group_of,
    measures_shares,
    parts_of,
    schedule_problems,
    share_problems,
    with_plan,
    word_of,
)
from megatron.fold3d.config.segment_flags import num_segments, segment_problems
from megatron.fold3d.config.settings import DRAWS, asked, ties_embeddings
from megatron.fold3d.config.trace_flags import iterations, records_tp_sync, trace_problems
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.passes.transfers import RECEIVES_AHEAD
from megatron.fold3d.plan.schedule_word import AUTO, VALUES, Word


def read_config(args: Namespace) -> Fold3DConfig:
    """Read Megatron's namespace, as parsed or as validated, and refuse options that cannot work.

    Validation may add options, from a checkpoint for example. A second call after validation checks
    these too.

    Raises:
        ValueError: one line for each rule that is broken.
    """
    if not hasattr(args, "schedule"):
        raise ValueError(
            "--yaml-cfg: Megatron then ignores the command line and with it --schedule and all of "
            "fold3d's flags; give the options as flags"
        )
    if problems := [*size_problems(args)]:  # the other rules divide by these sizes
        raise ValueError("\n".join(problems))
    schedule, segments = word_of(args).order, num_segments(args)
    written_out = str(word_of(args).written_out(max(1, segments)))
    args = with_plan(Namespace(**vars(args) | {"schedule": written_out}))
    problems = [
        *schedule_problems(args),
        *segment_problems(args, segments),
        *refusals(args),
        *unknown_segments(args, segments),
        *share_problems(args),
        *place_problems(args),
        *recompute_count_problems(args, segments),
        *trace_problems(args),
        *launch_problems(args),
        *traffic_class_problems(args),
    ]
    if problems:
        raise ValueError("\n".join(problems))
    # Megatron 0.19.2 has no flag for the threshold, but a script may set the attribute.
    skips = math.isfinite(getattr(args, "grad_norm_skip_threshold", math.inf))
    return Fold3DConfig(
        job=_job(args, segments),
        auto=frozenset(_measured_keys(args)),
        num_replicas=num_replicas(args),
        device=args.device,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        has_engine_modules=args.transformer_impl == "transformer_engine",
        recompute_layers=None if args.recompute_layers == AUTO else args.recompute_layers,
        auto_recompute_layers=args.recompute_layers == AUTO,
        recomputes_means=recomputes_means(args),
        activation_memory_bytes=args.activation_memory_bytes,
        clips_or_scales=bool(args.clip_grad > 0 or skips or args.fp16 or args.loss_scale),
        trace=args.trace,
        trace_iterations=iterations(args.trace_iterations),
        records_tp_sync=records_tp_sync(args),
        offload_activations=args.offload_activations,
        lazy_inter_segment=args.lazy_inter_segment,
        offload_everything=offloads_everything(args),
        cuts_every_segment=cuts_every_segment(args),
        ties_embeddings=ties_embeddings(args),
        keeps_forwards=schedule == AUTO
        and any(asked(args, setting) for setting in (*DRAWS, "--fp8-format", "--fp4-format")),
        keeps_sums=schedule == AUTO and bool(getattr(args, "deterministic_mode", False)),
        preemptive_comm=args.preemptive_comm,
        traffic_class=args.traffic_class,
        saved_bytes=saved_bytes(args, segments),
        delta_param_gather=coded(args, "delta_param_gather"),
        coded_grad_reduce=coded(args, "coded_grad_reduce"),
    )


def _choice(args: Namespace, num_segments: int) -> Choice:
    """Return the choice of the flags; it has no segments while only a checkpoint knows them."""
    word = word_of(args)
    plain = Choice.plain(word.order, num_segments)
    if not num_segments:
        return plain
    given = (part for key in VALUES for part in parts_of(args, key) if part.value != AUTO)
    choice = plain.chosen(Word(word.order, tuple(given)))
    all_at_once = choice.carries and choice.share is None and not measures_shares(args)
    return replace(
        choice,
        group=group_of(args) if choice.schedule == "interleaved" else None,
        share=1.0 if all_at_once else choice.share,
        slices=slices_dp_sync(args) or None,
    )


def _job(args: Namespace, num_segments: int) -> Job:
    is_small = args.bf16 or args.fp16
    return Job(
        choice=_choice(args, num_segments),
        num_ranks=args.pipeline_model_parallel_size,
        steps_shards=bool(args.use_distributed_optimizer),
        # DDP's hooks then only wait: `launch.install` lets Megatron align all-gathers, even with
        # one segment, since unaligned hooks start the all-gather of the next bucket.
        gathers_params=bool(args.overlap_param_gather),
        shards=args.shard_segments,
        grad_sync="overlap" if args.overlap_grad_reduce else "serial",
        reduces_early=reduces_early(args),
        receives_late=has_one_queue(args),
        receives_ahead=RECEIVES_AHEAD if args.device == "cpu" else 1,
        offload=None if args.offload_activations == "off" else OffloadChoice(),
        parameter_share=0.5 if is_small and args.accumulate_allreduce_grads_in_fp32 else 1.0,
    )


def _measured_keys(args: Namespace) -> Iterator[str]:
    """Yield the keys of the word whose values measured times choose."""
    yield from (part.key for part in word_of(args).parts if part.value == AUTO)
    if may_defer(args):
        yield "step"
    if parts_of(args, "wgrad", "gaps") or may_try(args, "wgrad=gaps"):
        yield "wgrad"
    if may_try(args, "optimizer=auto"):
        yield "optimizer"
    if measures_shares(args):
        yield "share"
