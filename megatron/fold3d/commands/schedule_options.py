"""The options that name a schedule and its sizes, and the compute plan that they stand for."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import get_args

from megatron.fold3d.config.backward_share_flags import AUTO
from megatron.fold3d.config.recompute_flags import stage_list, stages_of
from megatron.fold3d.config.weight_grad_flags import segment_list
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.passes.recompute import recompute_early
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.schedules import FORWARDS_AHEAD, SPLIT_SCHEDULES, LastSegment, build


def int_or_auto(text: str) -> int | str:
    """Read the value of ``--forwards-ahead``."""
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}") from None


def add_size_options(parser: ArgumentParser, *, required: bool, auto: bool = False) -> None:
    """Add everything but ``--schedule`` itself; ``auto`` where costs are known."""
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
        type=int_or_auto if auto else int,
        metavar="N",
        help="forwards that 1f1b (default: 1) and the last segment of aiao (default: 2) run for "
        "each rank behind before backwards" + "; auto is what takes least time" * auto,
    )
    parser.add_argument(
        "--recompute-early",
        type=stage_list,
        metavar="N,N",
        help="recompute these stages, or all, while the gradient is on its way (R)",
    )
    parser.add_argument(
        "--delay-weight-grads",
        type=segment_list,
        metavar="N,N",
        help="compute the weight gradients of these segments when all backwards are through",
    )


def compute_plan(args: Namespace, forwards_ahead: int | None = None) -> Plan:
    """Return the plan of ``args.schedule``, without transfers and gradient sync.

    Args:
        args: of the command.
        forwards_ahead: in place of an option that says auto.

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
    if args.forwards_ahead == AUTO and args.schedule not in FORWARDS_AHEAD:
        raise PlanError(
            f"--forwards-ahead auto with --schedule {args.schedule}: only "
            f"{' and '.join(FORWARDS_AHEAD)} read it; drop it, or give one of these"
        )
    if args.delay_weight_grads and args.schedule in SPLIT_SCHEDULES:
        raise PlanError(
            f"--delay-weight-grads {','.join(map(str, args.delay_weight_grads))} with --schedule "
            f"{args.schedule}: it has all weight gradients apart already; drop one of the two"
        )
    plan = build(
        args.schedule,
        num_ranks=args.pp,
        num_segments=1 if args.segments is None else args.segments,
        num_microbatches=args.microbatches,
        last_segment=args.aiao_last_segment or "1f1b",
        group_size=args.group_size,
        forwards_ahead=forwards_ahead if args.forwards_ahead == AUTO else args.forwards_ahead,
    )
    plan = delay_weight_grads(plan, args.delay_weight_grads or ())
    return recompute_early(plan, stages_of(args.recompute_early, plan.num_stages))
