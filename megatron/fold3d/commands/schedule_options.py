"""The options that name a schedule and its sizes, and the compute plan that they stand for."""

from argparse import ArgumentParser, Namespace
from typing import get_args

from megatron.fold3d.config.weight_grad_flags import segment_list
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.schedules import LastSegment, build


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
        "--delay-weight-grads",
        type=segment_list,
        metavar="N,N",
        help="compute the weight gradients of these segments when all backwards are through",
    )


def compute_plan(args: Namespace) -> Plan:
    """Return the plan of ``args.schedule``, without transfers and gradient sync.

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
    plan = build(
        args.schedule,
        num_ranks=args.pp,
        num_segments=1 if args.segments is None else args.segments,
        num_microbatches=args.microbatches,
        last_segment=args.aiao_last_segment or "1f1b",
        group_size=args.group_size,
    )
    return delay_weight_grads(plan, args.delay_weight_grads or ())
