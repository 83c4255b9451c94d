"""``--recompute-early``, ``--recompute-layers`` and ``--activation-memory-bytes``.

The options that the first flag excludes are here; `recompute_count_flags` has the others'.
"""

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator

from megatron.fold3d.config.argument_group import ArgumentGroup

ALL = "all"
AUTO = "auto"
_KEEP_MEANS = {"global_aux_loss", "quantile_balancing"}


def add_recompute_flags(group: ArgumentGroup) -> None:
    """Add the flags that say what is recomputed, and when."""
    group.add_argument(
        "--recompute-early",
        type=stage_list,
        metavar="N,N",
        help="With full recomputation, recompute these stages, counted over all ranks from 0, or "
        "all, while they wait for the gradient; each then holds one micro-batch's activations of "
        "all its layers.",
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


def stage_list(text: str) -> tuple[int, ...] | str:
    """Read the value of ``--recompute-early``: stages, separated by commas, or all."""
    try:
        return text if text == ALL else tuple(map(int, text.split(",")))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a list of stages nor {ALL}") from None


def counts_or_auto(text: str) -> tuple[int, ...] | str:
    """Read the value of ``--recompute-layers``: numbers of layers, or auto."""
    return text if text == AUTO else counts_list(text)


def counts_list(text: str) -> tuple[int, ...]:
    """Read numbers of layers, separated by commas."""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise ArgumentTypeError(
            f"{text!r} is neither a list of numbers of layers such as 2,1,0,0 nor {AUTO}"
        )
    return tuple(map(int, text.split(",")))


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


def recomputes_means(args: Namespace) -> bool:
    """Tell whether recomputations update means over an iteration's micro-batches.

    `plan.recompute_order` says which other states a recomputation updates.
    """
    kinds = args.moe_router_load_balancing_type
    keeps = bool(args.num_experts) and not _KEEP_MEANS.isdisjoint(
        [kinds] if isinstance(kinds, str) else kinds
    )
    return keeps and (
        args.recompute_granularity == "full"
        or args.recompute_layers is not None
        or "moe" in (args.recompute_modules or ())
        or bool(getattr(args, "moe_layer_recompute", False))
    )


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
    if args.recompute_granularity != "full" and args.recompute_layers is None:
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
