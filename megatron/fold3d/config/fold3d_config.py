"""Our flags, and the frozen configuration that they and Megatron's become.

Nothing here imports torch or Megatron, touches a device or makes a process group: a run that
cannot work ends here, within milliseconds, with every reason at once.
"""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from megatron.fold3d.config.backward_share_flags import share_or_auto, share_problems
from megatron.fold3d.config.bucket_flags import cuts_every_segment
from megatron.fold3d.config.layer_split import (
    fitting_segments,
    layers_per_rank,
    num_layers,
    uneven_ranks,
)
from megatron.fold3d.config.minimum_sizes import size_problems
from megatron.fold3d.config.nccl_settings import traffic_class_problems
from megatron.fold3d.config.offload_flags import offload_problems, offloads_everything, saved_bytes
from megatron.fold3d.config.preemption_flags import preemption_problems
from megatron.fold3d.config.recompute_flags import recompute_problems, stage_list, stages_of
from megatron.fold3d.config.refusals import named, refusals, spelled
from megatron.fold3d.config.segment_flags import AUTO, auto_problems, segments_or_auto
from megatron.fold3d.config.trace_flags import iterations, trace_problems
from megatron.fold3d.config.weight_grad_flags import segment_list, weight_grad_problems
from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.plan.schedules import (
    ONE_SEGMENT_SCHEDULES,
    SCHEDULES,
    SPLIT_SCHEDULES,
    LastSegment,
    check_forwards_ahead,
)
from megatron.fold3d.policy.backward_shares import FIRST_SHARE

Device = Literal["cuda", "cpu"]
Offload = Literal["off", "auto", "on"]

# A slice has to take much longer than to start it, and much less than an activation's transfer.
SLICE_BYTES: dict[Device, int] = {"cuda": 8 << 20, "cpu": 1 << 19}

# The flags from which Megatron derives virtual stages; it accepts one of them at a time.
_VIRTUAL_STAGE_FLAGS = {
    "num_virtual_stages_per_pipeline_rank": "--num-virtual-stages-per-pipeline-rank",
    "num_layers_per_virtual_pipeline_stage": "--num-layers-per-virtual-pipeline-stage",
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
}

# `(...)*n` or `x*n` in --pipeline-model-parallel-layout.
_REPEATED = re.compile(r"(?:\(([^)]+)\)|(.))\*(\d+)")


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags to Megatron's parser: the ``extra_args_provider`` of ``parse_args``."""
    group = parser.add_argument_group("FOLD3D")
    group.add_argument(
        "--schedule",
        choices=("stock", *SCHEDULES),
        help="Pipeline schedule; stock, the default, is the one Megatron picks.",
    )
    group.add_argument(
        "--plan-file",
        type=Path,
        metavar="FILE",
        help="Run the plan in FILE, in the text form of `fold3d plan`, instead of a --schedule.",
    )
    group.add_argument(
        "--segments",
        type=segments_or_auto,
        metavar="N",
        help="Model chunks per pipeline rank: sets Megatron's virtual stages. auto chooses from "
        "what the hardware is measured to do when the run starts.",
    )
    group.add_argument(
        "--aiao-last-segment",
        choices=get_args(LastSegment),
        help="Last segment of aiao: 1f1b, the default, holds fewer activations than the paper's "
        "afab in the same time.",
    )
    group.add_argument(
        "--forwards-ahead",
        type=int,
        metavar="N",
        help="How many forwards 1f1b, and the last segment of aiao, run for each rank behind "
        "before they begin to alternate with backwards: more hide slower transfers and hold more "
        "activations (default: 1 for 1f1b, 2 for aiao).",
    )
    group.add_argument(
        "--recompute-early",
        type=stage_list,
        metavar="N,N",
        help="With full recomputation, recompute these stages, counted over all ranks from 0, or "
        "all, while the gradient is on its way; each then holds one micro-batch's activations of "
        "all its layers.",
    )
    group.add_argument(
        "--backward-share",
        type=share_or_auto,
        metavar="X",
        help="Let DP.sync reach into the next iteration: the share X, from 0 to 1, of a segment's "
        "gradients is reduced behind its backward, the rest behind the next forward. auto measures "
        "what fits behind it. Not given, an iteration ends when all gradients are reduced.",
    )
    group.add_argument(
        "--dp-slice-bytes",
        type=int,
        metavar="N",
        help="With --backward-share or --preemptive-comm, reduce N bytes of gradients at once, so "
        "that what is needed sooner waits no longer than these take (default: 8388608, on CPUs "
        "524288; preemption measures what costs DP.sync little and takes less of it if it can).",
    )
    group.add_argument(
        "--delay-weight-grads",
        type=segment_list,
        metavar="N,N",
        default=(),
        help="Compute the weight gradients of these segments, counted from 0, when all backwards "
        "are through: the DP.sync of the segment that is needed first is hidden behind them.",
    )
    group.add_argument(
        "--model-preset",
        metavar="NAME",
        help="Build a model of the paper, such as gpt3-18b, or any layers-hidden-heads[-sequence]: "
        "stands for the flags of its shape, and those that are given win over it.",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="Record when each action begins and ends on each rank, and write one file per rank "
        "into DIR; see `fold3d trace`.",
    )
    group.add_argument(
        "--trace-iterations",
        metavar="A-B",
        help="The iterations to record, as the log numbers them (default: the fourth and the "
        "fifth of this run).",
    )
    group.add_argument(
        "--offload-activations",
        choices=get_args(Offload),
        default="off",
        help="Keep saved activations in host memory while no computation wants them: on moves all "
        "large ones, auto what recomputation starts from, and no more of it than the GPU's memory "
        "needs and its copy engine hides (default: off).",
    )
    group.add_argument(
        "--lazy-inter-segment",
        action="store_true",
        help="Send what goes from the last pipeline rank to the first through host memory, where "
        "it waits until it is used.",
    )
    group.add_argument(
        "--preemptive-comm",
        action="store_true",
        help="Let PP.sync go before DP.sync: gradients are reduced in slices, which wait while a "
        "transfer between pipeline ranks is under way.",
    )
    for groups in ("pp", "dp"):
        group.add_argument(
            f"--{groups}-traffic-class",
            type=int,
            metavar="N",
            help=f"Mark the packets of {groups.upper()}.sync over NCCL, so that switches and cards "
            "can put PP.sync first: on InfiniBand a service level, on RoCE four times a DSCP.",
        )
    group.add_argument(
        "--device",
        choices=get_args(Device),
        default="cuda",
        help="Train on GPUs over NCCL, or on CPUs over gloo (default: cuda).",
    )
    return parser


def megatron_defaults(args: Namespace) -> dict[str, Any]:
    """Return what our flags in ``args`` make of Megatron's: the ``args_defaults`` of its parser.

    A launcher parses, configures, and lets Megatron parse again and validate::

        args = parse_args(add_arguments)
        config = Fold3DConfig.from_args(args)
        args = parse_and_validate_args(add_arguments, args_defaults=megatron_defaults(args))
    """
    if args.segments in (None, AUTO) or _virtual_stage_flag(args):
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
        backward_share: share of DP.sync that starts with backward; the rest, and what is left of
            that, runs in the next iteration. None ends it with the iteration.
        auto_share: whether measured times replace it.
        dp_slice_bytes: how many bytes of gradients such a run reduces at once.
        auto_slices: whether preemption may choose less.
        delay_weight_grads: the segments whose weight gradients are apart from their backwards;
            unless the order itself says where, they follow all of these.
        forwards_ahead: how far 1F1B runs ahead, for each rank behind; None is the schedule's own.
        recompute_early: the stages that recompute before their gradients arrive.
        clips_or_scales: whether Megatron may clip gradients, or skip a step over a loss scale.
        trace: the folder that a trace is written to.
        trace_iterations: the iterations that are recorded; None is two after warm-up.
        cuts_every_segment: whether every segment's gradients are reduced in buckets.
        gathers_params: whether the plan gathers parameters that are updated in shards.
        preemptive_comm: whether transfers between pipeline ranks go before DP.sync.
        pp_traffic_class: marks PP.sync's packets.
        dp_traffic_class: marks DP.sync's.
        device: what Megatron trains on.
        offload_activations: whether saved activations go to host memory.
        lazy_inter_segment: whether transfers between segments wait in host memory.
        offload_everything: also what is saved without recomputation.
        saved_bytes: by one micro-batch's forward of a stage, as far as known; 0 if it is not.
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
        if problems := [*size_problems(args)]:  # with which the others cannot be looked for
            raise ValueError("\n".join(problems))
        schedule = "plan-file" if args.plan_file else args.schedule or "stock"
        num_segments = _num_segments(args)
        problems = [
            *_own_flags(args, schedule),
            *_segments(args, schedule, num_segments),
            *refusals(args, schedule),
            *share_problems(args, schedule),
            *offload_problems(args, schedule, num_segments),
            *weight_grad_problems(args, schedule, num_segments),
            *recompute_problems(args, schedule, args.pipeline_model_parallel_size * num_segments),
            *trace_problems(args, schedule),
            *preemption_problems(args, schedule),
            *traffic_class_problems(args),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        auto_share = args.backward_share == AUTO
        return cls(
            schedule=schedule,
            plan_file=args.plan_file,
            num_ranks=args.pipeline_model_parallel_size,
            num_segments=num_segments,
            aiao_last_segment=args.aiao_last_segment or "1f1b",
            device=args.device,
            microbatch_group_size=args.microbatch_group_size_per_vp_stage,
            distributed_timeout_minutes=args.distributed_timeout_minutes,
            backward_share=FIRST_SHARE if auto_share else args.backward_share,
            auto_share=auto_share,
            dp_slice_bytes=args.dp_slice_bytes or SLICE_BYTES[args.device],
            auto_slices=args.dp_slice_bytes is None,
            delay_weight_grads=(0,) if schedule in SPLIT_SCHEDULES else args.delay_weight_grads,
            forwards_ahead=args.forwards_ahead,
            recompute_early=stages_of(
                args.recompute_early, args.pipeline_model_parallel_size * num_segments
            ),
            clips_or_scales=args.clip_grad > 0 or args.fp16 or bool(args.loss_scale),
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
            saved_bytes=saved_bytes(args, num_segments),
        )


def _own_flags(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield what is wrong among our own flags."""
    if args.plan_file and args.schedule:
        yield (
            f"--plan-file {args.plan_file} with --schedule {args.schedule}: a plan is a schedule; "
            "give one of the two"
        )
    if args.plan_file and not args.plan_file.is_file():
        yield f"--plan-file {args.plan_file}: no such file; write one with `fold3d plan`"
    if args.aiao_last_segment and schedule != "aiao":
        yield (
            f"--aiao-last-segment {args.aiao_last_segment} with {named(schedule)}: only aiao "
            "reads it; drop it or give --schedule aiao"
        )
    if args.forwards_ahead is not None:
        try:
            check_forwards_ahead(args.forwards_ahead, schedule, args.aiao_last_segment)
        except PlanError as error:
            yield str(error)


def _virtual_stage_flag(args: Namespace) -> str | None:
    """Return the flag of Megatron's that sets virtual stages, with its value."""
    for attribute, flag in _VIRTUAL_STAGE_FLAGS.items():
        if (value := getattr(args, attribute)) is not None:
            return spelled(flag, value)
    return None


def _num_segments(args: Namespace) -> int:
    """Return the model chunks per rank as Megatron derived them, or as it will."""
    if hasattr(args, "virtual_pipeline_model_parallel_size"):
        return int(args.virtual_pipeline_model_parallel_size or 1)
    num_ranks: int = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is not None:
        return _num_stages(args.pipeline_model_parallel_layout) // num_ranks
    if args.num_layers_per_virtual_pipeline_stage is not None:
        return num_layers(args) // num_ranks // int(args.num_layers_per_virtual_pipeline_stage)
    chosen = 1 if args.segments == AUTO else args.segments
    return int(args.num_virtual_stages_per_pipeline_rank or chosen or 1)


def _num_stages(layout: str) -> int:
    """Count the stages of a layout such as ``E|(t|)*6L``: one more than it has bars."""
    layout, repeated = layout.replace(",", ""), 1  # commas are for the reader
    while repeated:
        layout, repeated = _REPEATED.subn(
            lambda found: (found[1] or found[2]) * int(found[3]), layout
        )
    return layout.count("|") + 1


def _segments(args: Namespace, schedule: str, num_segments: int) -> Iterator[str]:
    """Yield what is wrong with the number of segments."""
    if args.segments is None and schedule == "stock":
        return
    if args.segments == AUTO:
        yield from auto_problems(args, schedule, _virtual_stage_flag(args))
        return
    num_ranks = args.pipeline_model_parallel_size
    if args.segments is not None and args.segments < 1:
        yield f"--segments {args.segments}: a rank holds at least one segment; try --segments 1"
        return
    if args.segments not in (None, num_segments):
        yield (
            f"--segments {args.segments} with {_virtual_stage_flag(args)}: Megatron makes "
            f"{num_segments} of the latter; drop one of the two"
        )
    if num_segments > 1 and num_ranks == 1:
        yield (
            f"{num_segments} segments with --pipeline-model-parallel-size 1: without a pipeline "
            "Megatron builds one model chunk; use --segments 1 or more ranks"
        )
    if num_segments > 1 and schedule in ONE_SEGMENT_SCHEDULES:
        yield (
            f"{num_segments} segments with {named(schedule)}: it runs one segment per rank; "
            "use --segments 1, or --schedule aiao or interleaved"
        )
    if args.pipeline_model_parallel_layout is not None:
        return
    if num_layers(args):
        yield from _split(args, num_segments)
    elif args.num_layers_per_virtual_pipeline_stage is not None:
        yield (
            f"{_virtual_stage_flag(args)} without --num-layers: how many segments that makes is "
            "known from the checkpoint only; use --segments"
        )


def _split(args: Namespace, num_segments: int) -> Iterator[str]:
    """Yield why the layers cannot be split evenly over ranks and segments."""
    fitting = fitting_segments(args)
    if not fitting:
        yield uneven_ranks(args)
    elif num_segments not in fitting:
        per_rank = " and ".join(map(str, layers_per_rank(args)))
        yield (
            f"{num_segments} segments with {per_rank} layers per rank: "
            "every segment of a rank holds as many layers; try --segments "
            f"{', '.join(map(str, fitting))}, or --pipeline-model-parallel-layout"
        )
