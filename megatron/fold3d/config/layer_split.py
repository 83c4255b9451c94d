"""How Megatron splits a model's layers over pipeline ranks, and each rank's into segments."""

import re
from argparse import Namespace
from math import gcd

# `(...)*n` or `x*n` in --pipeline-model-parallel-layout.
_REPEATED = re.compile(r"(?:\(([^)]+)\)|(.))\*(\d+)")


def num_layers(args: Namespace) -> int:
    """Return the number of layers that are split over ranks; 0 if only a checkpoint knows it."""
    layers = args.num_layers or args.encoder_num_layers
    if not layers:
        return 0
    ends = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    return int(layers + ends)


def layers_per_rank(args: Namespace) -> tuple[int, ...]:
    """Return the layer counts that ranks have: the first and the last rank may have their own.

    The result is empty if the layers cannot be split evenly, or leave a rank without any.
    """
    per_rank = given_ends(args).values()
    rest, num_ranks = num_layers(args) - sum(per_rank), _ranks_of_the_rest(args)
    if num_ranks > 0 and rest % num_ranks:
        return ()
    found = (*per_rank, *((rest // num_ranks,) if num_ranks > 0 else ()))
    return found if min(found) > 0 else ()


def fitting_segments(args: Namespace) -> tuple[int, ...]:
    """Return the numbers of segments that every rank's layers can be split into evenly."""
    most = gcd(*layers_per_rank(args))
    return tuple(n for n in range(1, most + 1) if most % n == 0)


def may_be_uneven(args: Namespace) -> bool:
    """Return whether stages may hold any numbers of layers: all are alike, and no flag sets them.

    With virtual stages Megatron takes such numbers only from ``--pipeline-model-parallel-layout``,
    which excludes all other flags for the split. Predictions for offloading assume even layers.
    """
    return not (
        given_ends(args)
        or args.account_for_embedding_in_pipeline_split
        or args.account_for_loss_in_pipeline_split
        or args.mtp_num_layers
        or args.num_experts
        or args.heterogeneous_layers_config_path
        or args.offload_activations != "off"
    )


def uneven_ranks(args: Namespace) -> str:
    """Return the message (found, rule, fix) for layers that are too few, or do not divide."""
    given = given_ends(args)
    for flag, layers in given.items():
        if layers < 1:
            return f"{flag} {layers}: a rank holds one layer at least; give 1 or more"
    rest, ranks = num_layers(args) - sum(given.values()), _ranks_of_the_rest(args)
    if given and rest < ranks:
        found = " and ".join(f"{flag} {layers}" for flag, layers in given.items())
        return (
            f"{found} of {num_layers(args)} layers: the other {ranks} ranks hold one layer each at "
            f"least; give {num_layers(args) - ranks} at most"
        )
    return (
        f"{rest} layers on {ranks} ranks: each holds as many and one at least, unless "
        "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or "
        "--pipeline-model-parallel-layout says otherwise"
    )


def _ranks_of_the_rest(args: Namespace) -> int:
    return int(args.pipeline_model_parallel_size) - len(given_ends(args))


def given_ends(args: Namespace) -> dict[str, int]:
    """Return the flags that give the first or the last rank a number of layers, and the number."""
    ends = {
        "--decoder-first-pipeline-num-layers": args.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": args.decoder_last_pipeline_num_layers,
    }
    return {flag: layers for flag, layers in ends.items() if layers is not None}


def written_out(layout: str) -> str:
    """Return a layout such as ``E|(t|)*2L`` without repeats: ``E|t|t|L``."""
    layout, repeated = layout.replace(",", ""), 1  # commas are for the reader
    while repeated:
        layout, repeated = _REPEATED.subn(
            lambda found: (found[1] or found[2]) * int(found[3]), layout
        )
    return layout


def stage_layers(args: Namespace) -> tuple[int, ...]:
    """Return the layers of each stage, as Megatron splits them."""
    ranks = args.pipeline_model_parallel_size
    if (layout := args.pipeline_model_parallel_layout) is not None:
        return tuple(stage.count("t") for stage in written_out(str(layout)).split("|"))
    segments = args.virtual_pipeline_model_parallel_size or 1
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    rest, others = num_layers(args) - sum(given_ends(args).values()), _ranks_of_the_rest(args)
    of_rank = [rest // others if others else 0] * ranks
    of_rank[0] = of_rank[0] if first is None else first
    of_rank[-1] = of_rank[-1] if last is None else last
    stages = [layers // segments for layers in of_rank] * segments
    stages[0] -= args.account_for_embedding_in_pipeline_split
    stages[-1] -= args.account_for_loss_in_pipeline_split
    return tuple(stages)


def recomputed_layers(args: Namespace) -> tuple[int, ...]:
    """Return how many layers each stage recomputes where not all do; else nothing."""
    if args.recompute_method != "block":
        return ()
    split, counts = stage_layers(args), getattr(args, "recompute_layers", None)
    if counts == "auto":
        return (0,) * len(split)
    return tuple(counts or (min(n, args.recompute_num_layers) for n in split))
