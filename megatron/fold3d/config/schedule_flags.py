"""The flags that name the order of computation, and the options that they exclude."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from megatron.fold3d.config.argument_group import ArgumentGroup
from megatron.fold3d.config.refusals import named, scales_by_order
from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.plan.schedules import SCHEDULES, LastSegment, check_forwards_ahead


def add_schedule_flags(group: ArgumentGroup) -> None:
    """Add the flags that name the order of computation."""
    group.add_argument(
        "--schedule",
        choices=("stock", "auto", *SCHEDULES),
        help="Pipeline schedule; stock, the default, is the one Megatron picks. auto begins in its "
        "order, measures, and tries what is predicted to be faster for a few iterations: the "
        "schedule, --backward-share, --delay-weight-grads and --replicate-optimizer, as far as "
        "memory has room and sums stay the same. The fastest is kept, which may be stock's order.",
    )
    group.add_argument(
        "--plan-file",
        type=Path,
        metavar="FILE",
        help="Run the plan in FILE, in the text form of `fold3d plan`, instead of a --schedule.",
    )
    group.add_argument(
        "--aiao-last-segment",
        choices=get_args(LastSegment),
        help="Last segment of aiao: 1f1b, the default, holds fewer activations than the paper's "
        "afab in the same time.",
    )
    group.add_argument(
        "--forwards-ahead",
        type=int_or_auto,
        metavar="N",
        help="How many forwards 1f1b, interleaved and the last segment of aiao run for each rank "
        "behind before they begin to alternate with backwards: more hide slower transfers and hold "
        "more activations (default: 1 for 1f1b, else 2). auto measures the first iterations.",
    )
    group.add_argument(
        "--overlap-tensor-parallel",
        action="store_true",
        help="Run neighbouring micro-batches in pairs: one computes while a tensor-parallel "
        "collective, or an experts' all-to-all, of the other is in flight. A schedule then "
        "counts pairs, so it has the bubble and holds the activations of micro-batches twice as "
        "large.",
    )


def schedule_of(args: Namespace) -> str:
    """Return a name of `plan.schedules.SCHEDULES`, ``auto``, ``stock`` or ``plan-file``."""
    return "plan-file" if args.plan_file else args.schedule or "stock"


def schedule_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield one message (found, rule, fix) for each problem with the order of computation."""
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
    if args.forwards_ahead == "auto" and args.offload_activations != "off":
        yield (
            f"--forwards-ahead auto with --offload-activations {args.offload_activations}: each "
            "measures an iteration that the other changes; give a number"
        )
    if scales_by_order(args) and schedule in ("1f1b", "interleaved"):
        for flag, is_given in (
            (f"--forwards-ahead {args.forwards_ahead}", args.forwards_ahead is not None),
            ("--delay-weight-grads auto", args.delay_weight_grads == "auto"),
        ):
            if is_given:
                yield (
                    f"{flag} with --fp8-format {args.fp8}: delayed scaling reads what a rank has "
                    "computed last, and stock's order is another; drop it, or give --fp8-recipe "
                    "tensorwise"
                )


def int_or_auto(text: str) -> int | Literal["auto"]:
    """Read the value of ``--forwards-ahead``."""
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a number nor auto") from None
