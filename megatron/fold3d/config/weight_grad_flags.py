"""``--delay-weight-grads``: the flag, and what a split backward cannot be combined with.

Schedules such as zb-h1 split the backward without that flag, and have the same limits.
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator

from megatron.fold3d.config.argument_group import ArgumentGroup
from megatron.fold3d.plan.schedules import SPLIT_SCHEDULES


def add_weight_grad_flags(group: ArgumentGroup) -> None:
    """Add ``--delay-weight-grads``."""
    group.add_argument(
        "--delay-weight-grads",
        type=segment_list,
        metavar="N,N",
        default=(),
        help="Compute the weight gradients of these segments, counted from 0, when all backwards "
        "are through: the DP.sync of the segment that is needed first is hidden behind them.",
    )


def segment_list(text: str) -> tuple[int, ...]:
    """Read the value of ``--delay-weight-grads``: segments, separated by commas."""
    try:
        segments = tuple(sorted(map(int, text.split(","))))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of segments such as 3,4") from None
    if len(set(segments)) < len(segments):
        raise ArgumentTypeError(f"{text!r} names a segment twice")
    return segments


def weight_grad_problems(args: Namespace, schedule: str, num_segments: int) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting that a split backward cannot run with.

    Args:
        args: Megatron's namespace.
        schedule: the schedule that will run.
        num_segments: of a rank; 0 if not known yet.
    """
    found = f"--delay-weight-grads {','.join(map(str, args.delay_weight_grads))}"
    if schedule in SPLIT_SCHEDULES:
        if args.delay_weight_grads:
            yield (
                f"{found} with --schedule {schedule}: it has all weight gradients apart already; "
                "drop one of the two"
            )
        found = f"--schedule {schedule}"
    elif not args.delay_weight_grads:
        return
    elif schedule == "stock":
        yield f"{found} with --schedule stock: only a plan has them apart; give --schedule aiao"
        return
    if schedule in SPLIT_SCHEDULES:
        pass  # these have one segment, which is checked elsewhere
    elif args.segments == "auto":  # not imported: its module brings the simulator along
        yield f"{found} with --segments auto: which segments that are is not known; give a number"
    elif num_segments and (
        unknown := [s for s in args.delay_weight_grads if not 0 <= s < num_segments]
    ):
        yield (
            f"{found}: there is no segment {unknown[0]}, a rank holds {num_segments}; "
            f"give some of 0 to {num_segments - 1}"
        )
    if args.transformer_impl != "local":
        yield (
            f"{found} with --transformer-impl {args.transformer_impl}: the linear layers of "
            "Megatron itself are split in two; give --transformer-impl local"
        )
    if args.gradient_accumulation_fusion:
        yield (
            f"{found} with fused weight gradients: the kernel is a part of the backward; "
            "add --no-gradient-accumulation-fusion"
        )
    if args.num_experts:
        yield (
            f"{found} with --num-experts {args.num_experts}: the linear layers of experts are "
            "not split; drop one of the two"
        )
    if args.offload_activations != "off":
        yield (
            f"{found} with --offload-activations {args.offload_activations}: what weight gradients "
            "are computed from would come back for the backward and stay; drop one of the two"
        )
