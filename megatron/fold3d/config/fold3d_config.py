"""Our flags, and the frozen configuration made of them and Megatron's.

Each feature's file holds its flags, what they mean, and what they cannot be combined with; this
file puts them together. Nothing in this room imports torch or Megatron, touches a device or makes a
process group: a run that cannot work ends here, within milliseconds, with every reason at once.
"""

import math
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from megatron.fold3d.config.backward_share_flags import add_share_flags, first_share, share_problems
from megatron.fold3d.config.bucket_flags import cuts_every_segment
from megatron.fold3d.config.minimum_sizes import size_problems
from megatron.fold3d.config.nccl_settings import add_traffic_class_flags, traffic_class_problems
from megatron.fold3d.config.offload_flags import (
    Offload,
    add_offload_flags,
    offload_problems,
    offloads_everything,
    saved_bytes,
)
from megatron.fold3d.config.preemption_flags import add_preemption_flags, preemption_problems
from megatron.fold3d.config.recompute_flags import (
    add_recompute_flags,
    recompute_problems,
    stages_of,
)
from megatron.fold3d.config.refusals import refusals
from megatron.fold3d.config.schedule_flags import add_schedule_flags, schedule_of, schedule_problems
from megatron.fold3d.config.segment_flags import (
    AUTO,
    add_segment_flags,
    num_segments,
    segment_problems,
    virtual_stage_flag,
)
from megatron.fold3d.config.trace_flags import add_trace_flags, iterations, trace_problems
from megatron.fold3d.config.weight_grad_flags import add_weight_grad_flags, weight_grad_problems
from megatron.fold3d.plan.schedules import SPLIT_SCHEDULES, LastSegment

Device = Literal["cuda", "cpu"]

# A slice has to take much longer than its launch, and much less than an activation's transfer.
SLICE_BYTES: dict[Device, int] = {"cuda": 8 << 20, "cpu": 1 << 19}

_FLAGS_OF_FEATURES = (
    add_schedule_flags,
    add_segment_flags,
    add_recompute_flags,
    add_share_flags,
    add_weight_grad_flags,
    add_preemption_flags,
    add_offload_flags,
    add_traffic_class_flags,
    add_trace_flags,
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
        "stands for the flags of its shape, and those that are given win over it.",
    )
    group.add_argument(
        "--device",
        choices=get_args(Device),
        default="cuda",
        help="Train on GPUs over NCCL, or on CPUs over gloo (default: cuda).",
    )
    return parser


def megatron_defaults(args: Namespace) -> dict[str, Any]:
    """Return the values that our flags give to Megatron's: the ``args_defaults`` of its parser.

    A launcher parses, configures, and lets Megatron parse again and validate::

        args = parse_args(add_arguments)
        config = Fold3DConfig.from_args(args)
        args = parse_and_validate_args(add_arguments, args_defaults=megatron_defaults(args))
    """
    if args.segments in (None, AUTO) or virtual_stage_flag(args):
        return {}
    return {"num_virtual_stages_per_pipeline_rank": args.segments}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold3DConfig:
    """One run's choices.

    Attributes:
        schedule: a name of `plan.schedules.SCHEDULES`, ``stock`` or ``plan-file``.
        plan_file: the plan to run; given with ``plan-file`` only.
        num_ranks: pipeline ranks: Megatron's ``--pipeline-model-parallel-size``.
        num_segments: model chunks per pipeline rank, from whichever flag says so.
        aiao_last_segment: how ``aiao`` runs its last segment.
        backward_share: share of DP.sync, from 0 to 1, that starts during the backwards; the rest,
            and what they do not hide, runs in the next iteration. None ends DP.sync with the
            iteration.
        auto_share: whether measured times replace ``backward_share``.
        dp_slice_bytes: bytes of gradients that a deferring run reduces at once.
        auto_slices: whether preemption may choose smaller slices.
        delay_weight_grads: the segments whose weight gradients are split from their backwards;
            unless the order itself places them, they follow all backwards.
        forwards_ahead: forwards that 1F1B runs ahead per rank behind; None is the schedule's own.
        recompute_early: the stages that recompute before their gradients arrive.
        clips_or_scales: whether Megatron may clip gradients, or skip a step over their norm or a
            loss scale.
        trace: the folder that a trace is written to.
        trace_iterations: the iterations that are recorded; None is two after warm-up.
        cuts_every_segment: whether every segment's gradients are reduced in buckets.
        gathers_params: whether the plan gathers parameters that are updated in shards.
        preemptive_comm: whether transfers between pipeline ranks go before DP.sync.
        pp_traffic_class: marks PP.sync's packets.
        dp_traffic_class: marks DP.sync's packets.
        device: what Megatron trains on.
        offload_activations: whether saved activations go to host memory.
        lazy_inter_segment: whether transfers between segments wait in host memory.
        offload_everything: whether all large saved tensors are offloaded, not only those that
            recomputation starts from.
        saved_bytes: a lower bound on what one micro-batch's forward of a stage saves; 0 if unknown.
        microbatch_group_size: micro-batches per group of ``interleaved``; None is one per rank.
        distributed_timeout_minutes: how long a transfer may take before the job ends.
    """

    schedule: str
    plan_file: Path | None
    num_ranks: int
    num_segments: int
    aiao_last_segment: LastSegment
    device: Device
    microbatch_group_size: int | None
    distributed_timeout_minutes: float
    backward_share: float | None = None
    auto_share: bool = False
    dp_slice_bytes: int = 0
    auto_slices: bool = False
    delay_weight_grads: tuple[int, ...] = ()
    forwards_ahead: int | None = None
    recompute_early: tuple[int, ...] = ()
    clips_or_scales: bool = False
    trace: Path | None = None
    trace_iterations: range | None = None
    offload_activations: Offload = "off"
    lazy_inter_segment: bool = False
    offload_everything: bool = False
    cuts_every_segment: bool = False
    gathers_params: bool = False
    preemptive_comm: bool = False
    pp_traffic_class: int | None = None
    dp_traffic_class: int | None = None
    saved_bytes: int = 0

    @property
    def deferred_stages(self) -> range:
        """The stages whose DP.sync may reach into the next iteration."""
        return range(0 if self.backward_share is None else self.num_ranks * self.num_segments)

    @classmethod
    def from_args(cls, args: Namespace) -> "Fold3DConfig":
        """Read Megatron's namespace, as parsed or as validated, and refuse what cannot work.

        Validation may add options of its own, from a checkpoint for example: reading the
        namespace again afterwards refuses those too.

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
        problems = [
            *schedule_problems(args, schedule),
            *segment_problems(args, schedule, segments),
            *refusals(args, schedule),
            *share_problems(args, schedule),
            *offload_problems(args, schedule, segments),
            *weight_grad_problems(args, schedule, segments),
            *recompute_problems(args, schedule, args.pipeline_model_parallel_size * segments),
            *trace_problems(args, schedule),
            *preemption_problems(args, schedule),
            *traffic_class_problems(args),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return cls(
            schedule=schedule,
            plan_file=args.plan_file,
            num_ranks=args.pipeline_model_parallel_size,
            num_segments=segments,
            aiao_last_segment=args.aiao_last_segment or "1f1b",
            device=args.device,
            microbatch_group_size=args.microbatch_group_size_per_vp_stage,
            distributed_timeout_minutes=args.distributed_timeout_minutes,
            backward_share=first_share(args),
            auto_share=args.backward_share == AUTO,
            dp_slice_bytes=args.dp_slice_bytes or SLICE_BYTES[args.device],
            auto_slices=args.dp_slice_bytes is None,
            delay_weight_grads=(0,) if schedule in SPLIT_SCHEDULES else args.delay_weight_grads,
            forwards_ahead=args.forwards_ahead,
            recompute_early=stages_of(
                args.recompute_early, args.pipeline_model_parallel_size * segments
            ),
            clips_or_scales=_clips_or_scales(args),
            trace=args.trace,
            trace_iterations=iterations(args.trace_iterations),
            offload_activations=args.offload_activations,
            lazy_inter_segment=args.lazy_inter_segment,
            offload_everything=offloads_everything(args),
            cuts_every_segment=cuts_every_segment(args),
            gathers_params=args.overlap_param_gather and args.align_param_gather,
            preemptive_comm=args.preemptive_comm,
            pp_traffic_class=args.pp_traffic_class,
            dp_traffic_class=args.dp_traffic_class,
            saved_bytes=saved_bytes(args, segments),
        )


def _clips_or_scales(args: Namespace) -> bool:
    # Megatron 0.19.2 has no flag for the threshold; an attribute set in another way is obeyed.
    skips = math.isfinite(getattr(args, "grad_norm_skip_threshold", math.inf))
    return bool(args.clip_grad > 0 or skips or args.fp16 or args.loss_scale)
