"""Our flags in Megatron's parser, and the values that they give to Megatron's flags."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, get_args

from megatron.fold3d.config.fold3d_config import Device, Switch
from megatron.fold3d.config.gpu_settings import traffic_classes
from megatron.fold3d.config.recompute_flags import counts_or_auto
from megatron.fold3d.config.schedule_flags import add_schedule_word, word_of
from megatron.fold3d.config.segment_flags import segments_or_auto, virtual_stage_flag
from megatron.fold3d.plan.schedule_word import AUTO, ORDERS, PLAN, VALUES
from megatron.fold3d.upstream.pretrain import add_later_flags


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our flags to Megatron's parser: the ``extra_args_provider`` of ``parse_args``."""
    group = parser.add_argument_group("FOLD3D")
    keys = "; ".join(f"{key}={'|'.join(values)}" for key, values in VALUES.items())
    add_schedule_word(
        group,
        f"The pipeline schedule: an order ({', '.join(ORDERS)}, or {PLAN}=FILE, as `fold3d plan` "
        "writes it), then :key=value[@segments] for each further choice. stock, the default, is "
        "the schedule that Megatron picks. auto begins in its order, measures, and tries what is "
        "predicted to be faster for a few iterations, as far as memory has room and sums stay the "
        f"same; the fastest is kept, which may be stock's order. Keys: {keys}. docs/flags.md says "
        "what each does.",
    )
    group.add_argument(
        "--segments",
        type=segments_or_auto,
        metavar="N",
        help="Model chunks per pipeline rank: sets Megatron's virtual stages. auto measures "
        "the hardware when the run starts, and chooses this number and the layers of each "
        "stage.",
    )
    group.add_argument(
        "--recompute-layers",
        type=counts_or_auto,
        metavar="N,N|auto",
        help="Recompute so many layers of each stage, counted over all ranks from 0: stands for "
        "--recompute-granularity full --recompute-method block, with a number for each stage. auto "
        "measures a layer's bytes in the first iteration, and recomputes as few as memory allows.",
    )
    group.add_argument(
        "--activation-memory-bytes",
        type=int,
        metavar="N",
        help="With --recompute-layers auto, the memory for saved activations on each rank "
        "(default: what the GPU has left); with --offload-activations, the host memory for them "
        "in the first iteration (default: what they take, if the flags say it).",
    )
    group.add_argument(
        "--shard-segments",
        choices=("off", "weights", "gradients"),
        default="off",
        help="weights: keep a segment's parameters whole only while it computes. Each replica then "
        "holds its shard of them, and they are gathered once for the segment's forwards and once "
        "for its backwards. gradients: also keep its gradients whole only until they are reduced, "
        "and then a shard of them (default: off).",
    )
    group.add_argument(
        "--preemptive-comm",
        action="store_true",
        help="Let PP.sync preempt DP.sync: gradients are reduced in slices, and none starts while "
        "a transfer between pipeline ranks is in flight.",
    )
    group.add_argument(
        "--offload-activations",
        choices=get_args(Switch),
        default="off",
        help="Keep saved activations in host memory until their backward needs them: on moves all "
        "large ones, auto the inputs of recomputation, and no more of them than the GPU's memory "
        "needs and its copy engine hides (default: off).",
    )
    group.add_argument(
        "--lazy-inter-segment",
        action="store_true",
        help="Send tensors from the last pipeline rank to the first through host memory, where "
        "they wait until they are used.",
    )
    group.add_argument(
        "--delta-param-gather",
        choices=get_args(Switch),
        help="With the distributed optimizer, gather what a step has changed in place of whole "
        "parameters: a few of their 16 bits, and the same parameters bit for bit. auto measures in "
        "the first step if that is faster, and leaves it otherwise (default: auto with --schedule "
        "auto, else off).",
    )
    group.add_argument(
        "--coded-grad-reduce",
        choices=get_args(Switch),
        help="With the distributed optimizer, sum gradients to shards in a code without loss: 72%% "
        "of the bytes of gradients in bf16, 86%% in fp32, 60%% where these are sums of eight "
        "bf16 ones (--no-gradient-accumulation-fusion). auto measures at the first sum if that "
        "is faster, and leaves it otherwise (default: auto with --schedule auto, else off).",
    )
    group.add_argument(
        "--traffic-class",
        type=traffic_classes,
        default={},
        metavar="pp=N,dp=N",
        help="Mark the packets of PP.sync, of DP.sync or of both over NCCL, so that switches and "
        "cards can put PP.sync first: on InfiniBand a service level, on RoCE four times a DSCP.",
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
    add_later_flags(parser)
    return parser


def megatron_defaults(args: Namespace) -> dict[str, Any]:
    """Return the values that our flags give to Megatron's flags, as ``args_defaults``."""
    defaults: dict[str, Any] = {}
    if args.segments not in (None, AUTO) and not virtual_stage_flag(args):
        defaults["num_virtual_stages_per_pipeline_rank"] = args.segments
    if (group := word_of(args).number("group")) is not None:
        defaults["microbatch_group_size_per_vp_stage"] = group
    if args.recompute_layers is not None:
        defaults |= {"recompute_granularity": "full", "recompute_method": "block"}
        auto = args.recompute_layers == AUTO
        defaults["recompute_num_layers"] = 1 if auto else max(1, *args.recompute_layers)
    return defaults
