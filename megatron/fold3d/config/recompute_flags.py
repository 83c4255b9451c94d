"""``--recompute-early``: the flag, and what it cannot be combined with."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator

from megatron.fold3d.config.argument_group import ArgumentGroup

ALL = "all"


def add_recompute_flags(group: ArgumentGroup) -> None:
    """Add ``--recompute-early``."""
    group.add_argument(
        "--recompute-early",
        type=stage_list,
        metavar="N,N",
        help="With full recomputation, recompute these stages, counted over all ranks from 0, or "
        "all, while the gradient is on its way; each then holds one micro-batch's activations of "
        "all its layers.",
    )


def stage_list(text: str) -> tuple[int, ...] | str:
    """Read the value of ``--recompute-early``: stages, separated by commas, or all."""
    try:
        return text if text == ALL else tuple(map(int, text.split(",")))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a list of stages nor {ALL}") from None


def spelled_stages(named: tuple[int, ...] | str) -> str:
    """Return the flag as a user types it."""
    value = named if isinstance(named, str) else ",".join(map(str, named))
    return f"--recompute-early {value}"


def stages_of(named: tuple[int, ...] | str | None, num_stages: int) -> tuple[int, ...]:
    """Return the stages that the value stands for.

    Raises:
        ValueError: the plan does not have one of them.
    """
    if isinstance(named, str):
        return tuple(range(num_stages))
    if unknown := [stage for stage in named or () if not 0 <= stage < num_stages]:
        raise ValueError(
            f"{spelled_stages(named or ())}: there is no stage {unknown[0]}; the plan has stages 0 "
            f"to {num_stages - 1}"
        )
    return named or ()


def recompute_problems(args: Namespace, schedule: str, num_stages: int) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting ``--recompute-early`` cannot run with."""
    if args.recompute_early is None:
        return
    found = spelled_stages(args.recompute_early)
    if schedule == "stock":
        yield f"{found} with --schedule stock: only a plan has it apart; give --schedule 1f1b"
        return
    if args.segments == "auto":
        yield f"{found} with --segments auto: which stages that are is not known; give a number"
    else:
        try:
            stages_of(args.recompute_early, num_stages)
        except ValueError as error:
            yield str(error)
    if args.recompute_granularity != "full":
        yield (
            f"{found} without --recompute-granularity full: only what recomputes whole layers does "
            "so ahead of their backward; add it, with --recompute-method and --recompute-num-layers"
        )
    if args.distribute_saved_activations:
        yield (
            f"{found} with --distribute-saved-activations: inputs are cut up until the backward "
            "gathers them; drop one of the two"
        )
    if args.fp8 or args.fp4:
        yield (
            f"{found} with --{'fp8' if args.fp8 else 'fp4'}-format: Transformer Engine recomputes "
            "by itself; drop one of the two"
        )
    if args.offload_activations != "off":
        yield (
            f"{found} with --offload-activations {args.offload_activations}: activations come back "
            "for the backward, not for what is computed ahead of it; drop one of the two"
        )
