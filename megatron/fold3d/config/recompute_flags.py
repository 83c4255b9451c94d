"""``recompute=early``, ``--recompute-layers`` and ``--activation-memory-bytes``.

The options that the first excludes are here; `recompute_count_flags` has the others'.
"""

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator

from megatron.fold3d.config.argument_group import ArgumentGroup
from megatron.fold3d.plan.schedule_word import AUTO, Part

_KEEP_MEANS = {"global_aux_loss", "quantile_balancing"}


def add_recompute_flags(group: ArgumentGroup) -> None:
    """Add the flags that say what is recomputed, and when."""
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


def recompute_problems(args: Namespace, schedule: str, num_segments: int) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting ``recompute=early`` cannot run with."""
    segments = args.recompute_early
    if not segments:
        return
    found = str(Part("recompute", "early", segments))
    if schedule == "stock":
        yield f"{found} with --schedule stock: only a plan has it apart; give --schedule 1f1b"
        return
    if args.segments == "auto":
        yield f"{found} with --segments auto: which segments that is is not known; give a number"
    elif num_segments and (unknown := [s for s in segments if s >= num_segments]):
        yield (
            f"{found}: there is no segment {unknown[0]}, a rank holds {num_segments}; "
            f"give some of 0 to {num_segments - 1}"
        )
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
