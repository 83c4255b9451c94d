"""The options that name a schedule and its sizes, and the compute plan that they stand for."""

from argparse import ArgumentParser, Namespace
from typing import get_args

from megatron.fold3d.config.backward_share_flags import AUTO
from megatron.fold3d.config.recompute_flags import stage_list, stages_of
from megatron.fold3d.config.schedule_flags import int_or_auto
from megatron.fold3d.config.weight_grad_flags import segments_or_auto
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.passes.pairs import check_pairs, in_pairs, num_pairs
from megatron.fold3d.plan.passes.recompute import recompute_early
from megatron.fold3d.plan.passes.shard_params import shard_params
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.schedules import (
    SPLIT_SCHEDULES,
    LastSegment,
    build,
    check_forwards_ahead,
)


def add_size_options(parser: ArgumentParser, *, required: bool) -> None:
    """Add everything but ``--schedule`` itself."""
    parser.add_argument("--pp", required=required, type=int, metavar="N", help="pipeline ranks")
    parser.add_argument(
        "--segments", type=int, metavar="N", help="model chunks per rank (default: 1)"
    )
    parser.add_argument("--microbatches", required=required, type=int, metavar="N")
    parser.add_argument(
        "--aiao-last-segment",
        choices=get_args(LastSegment),
        help="1f1b (default) holds fewer activations in the same time than the paper's afab",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="micro-batches per group of interleaved (default: as many as ranks)",
    )
    parser.add_argument(
        "--forwards-ahead",
        type=int_or_auto,
        metavar="N",
        help="forwards that 1f1b (default: 1), interleaved and the last segment of aiao (default: "
        "2) run for each rank behind before backwards; auto is what takes least time",
    )
    parser.add_argument(
        "--recompute-early",
        type=stage_list,
        metavar="N,N",
        help="recompute these stages, or all, while they wait for the gradient (R)",
    )
    parser.add_argument(
        "--shard-segments",
        choices=("weights", "gradients"),
        help="weights: free a stage's parameters behind its last use and gather them again before "
        "its backwards; gradients: also keep only a shard of its reduced gradients",
    )
    parser.add_argument(
        "--overlap-tensor-parallel",
        action="store_true",
        default=None,
        help="in pairs of neighbouring micro-batches, each computed during the other's "
        "tensor-parallel collectives",
    )
    parser.add_argument(
        "--delay-weight-grads",
        type=segments_or_auto,
        metavar="N,N",
        help="compute the weight gradients of these segments when all backwards are through; auto "
        "puts those of all segments where ranks would wait, if that takes less time",
    )
    parser.add_argument(
        "--most-activations",
        type=int,
        metavar="N",
        help="with --delay-weight-grads auto: micro-batches of a model chunk that a rank holds, "
        "those whose weight gradients are missing included (default: as many as the fullest rank "
        "without them, or what a model leaves of the GPUs' memory)",
    )


def asks_to_choose(args: Namespace) -> bool:
    """Whether an option leaves the order of computation to its costs."""
    return AUTO in (args.forwards_ahead, args.delay_weight_grads)


def compute_plan(args: Namespace, forwards_ahead: int | None = None) -> Plan:
    """Return the plan of ``args.schedule``, without transfers and gradient sync.

    Args:
        args: the command's arguments.
        forwards_ahead: replaces ``--forwards-ahead auto``; all weight gradients then stay in their
            backwards.

    Raises:
        PlanError: no such plan can run, or an option has no reader.
    """
    for flag, value, reader in (
        ("--aiao-last-segment", args.aiao_last_segment, "aiao"),
        ("--group-size", args.group_size, "interleaved"),
    ):
        if value is not None and args.schedule != reader:
            raise PlanError(
                f"{flag} {value} with --schedule {args.schedule}: only {reader} reads it; "
                f"drop it or give --schedule {reader}"
            )
    if args.forwards_ahead == AUTO:
        check_forwards_ahead("auto", args.schedule, args.aiao_last_segment)
    delayed = args.delay_weight_grads or ()
    if delayed and args.schedule in SPLIT_SCHEDULES:
        raise PlanError(
            f"--delay-weight-grads {spelled(delayed)} with --schedule "
            f"{args.schedule}: it has all weight gradients apart already; drop one of the two"
        )
    if args.most_activations is not None and (delayed != AUTO or args.most_activations < 1):
        raise PlanError(
            f"--most-activations {args.most_activations}: it limits what --delay-weight-grads auto "
            "holds, and a rank holds at least one; give both, or drop it"
        )
    paired = bool(args.overlap_tensor_parallel)
    if paired:
        _check_paired(args)
    plan = build(
        args.schedule,
        num_ranks=args.pp,
        num_segments=1 if args.segments is None else args.segments,
        num_microbatches=num_pairs(args.microbatches) if paired else args.microbatches,
        last_segment=args.aiao_last_segment or "1f1b",
        group_size=args.group_size,
        forwards_ahead=forwards_ahead if args.forwards_ahead == AUTO else args.forwards_ahead,
    )
    if paired:
        plan = in_pairs(plan, args.microbatches)
        check_pairs(plan)
    plan = delay_weight_grads(plan, () if delayed == AUTO else delayed)
    early = stages_of(args.recompute_early, plan.num_stages)
    plan = recompute_early(plan, early, in_pairs=paired)
    return plan if args.shard_segments is None else shard_params(plan)


def spelled(value: object) -> str:
    """Return an option's value as the command line has it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_paired(args: Namespace) -> None:
    """Refuse what training refuses beside pairs, as far as it concerns the plan."""
    if args.schedule in SPLIT_SCHEDULES:
        raise PlanError(
            f"--overlap-tensor-parallel with --schedule {args.schedule}: weight gradients are "
            "computed apart for one micro-batch at a time; give --schedule 1f1b"
        )
    for name in ("delay_weight_grads", "group_size"):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise PlanError(
                f"--overlap-tensor-parallel with {flag}: never shown to train what stock does; "
                "drop one of the two"
            )
