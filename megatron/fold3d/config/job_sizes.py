"""Sizes of a run, and how Megatron splits a model's layers over pipeline ranks and segments."""

import math
import re
from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.spelling import flag_of

# Attributes of Megatron's namespace, each named as its flag. With values below one, Megatron
# divides by zero or trains nothing.
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "eval_micro_batch_size",
    "eval_interval",
    "log_interval",
    "seed",
    "make_vocab_size_divisible_by",
    "distributed_timeout_minutes",
)
# `(...)*n` or `x*n` in --pipeline-model-parallel-layout.
_REPEATED = re.compile(r"(?:\(([^)]+)\)|(.))\*(\d+)")


def size_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) for each given size below one."""
    for name in _SIZES:
        if (size := getattr(args, name, None)) is not None and size < 1:
            yield f"{flag_of(name)} {size}: it is at least one; give another number"


def ranks_of_model(args: Namespace) -> int:
    """Return the number of ranks in one replica of the model."""
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    return int(math.prod((*sizes, args.context_parallel_size)))


def num_replicas(args: Namespace) -> int:
    """Return the most ranks that hold the same parameters; 0 until the world size is known.

    Context-parallel ranks hold the same layers, so they reduce gradients as replicas do. An expert
    may have more replicas than other layers: tensor-parallel ranks share a layer, but may each hold
    the whole expert.

    Args:
        args: Megatron's namespace, with the number of data-parallel ranks once it is known.
    """
    dense = (getattr(args, "data_parallel_size", None) or 0) * args.context_parallel_size
    if not args.num_experts:
        return int(dense)
    in_layer = args.tensor_model_parallel_size
    in_expert = args.expert_tensor_parallel_size or in_layer
    return int(max(dense, dense * in_layer // (in_expert * args.expert_model_parallel_size)))


def num_microbatches(args: Namespace, data_parallel: int | None = None) -> int:
    """Return the micro-batches of an iteration after ramp-up, from parsed or validated flags.

    Args:
        args: Megatron's namespace.
        data_parallel: how many pipelines share a batch; None takes it from the number of ranks.
    """
    if data_parallel is None:
        data_parallel = max(1, args.world_size // ranks_of_model(args))
    at_once = args.micro_batch_size * data_parallel
    return max(1, int((args.global_batch_size or at_once) // at_once))


def num_layers(args: Namespace) -> int:
    """Return the number of layers that are split over ranks; 0 if only a checkpoint knows it."""
    layers = args.num_layers or args.encoder_num_layers
    if not layers:
        return 0
    ends = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    return int(layers + ends)


def layers_per_rank(args: Namespace) -> tuple[int, ...]:
    """Return the numbers of layers of ranks; flags may set the first and the last rank's.

    The result is empty if the layers cannot be split evenly, or leave a rank without any.
    """
    per_rank = given_ends(args).values()
    rest, num_ranks = num_layers(args) - sum(per_rank), _ranks_without_flag(args)
    if num_ranks > 0 and rest % num_ranks:
        return ()
    found = (*per_rank, *((rest // num_ranks,) if num_ranks > 0 else ()))
    return found if min(found) > 0 else ()


def fitting_segments(args: Namespace) -> tuple[int, ...]:
    """Return the numbers of segments that divide every rank's layers evenly."""
    most = math.gcd(*layers_per_rank(args))
    return tuple(n for n in range(1, most + 1) if most % n == 0)


def may_be_uneven(args: Namespace) -> bool:
    """Return whether stages may hold any numbers of layers: layers are alike, and no flag splits.

    With virtual stages Megatron takes such a split only from ``--pipeline-model-parallel-layout``,
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
    """Return the message (found, rule, fix) for layers that ranks cannot share evenly."""
    given = given_ends(args)
    for flag, layers in given.items():
        if layers < 1:
            return f"{flag} {layers}: a rank holds one layer at least; give 1 or more"
    rest, ranks = num_layers(args) - sum(given.values()), _ranks_without_flag(args)
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


def _ranks_without_flag(args: Namespace) -> int:
    return int(args.pipeline_model_parallel_size) - len(given_ends(args))


def given_ends(args: Namespace) -> dict[str, int]:
    """Return the flags that set the layers of the first or the last rank, with their values."""
    ends = {
        "--decoder-first-pipeline-num-layers": args.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": args.decoder_last_pipeline_num_layers,
    }
    return {flag: layers for flag, layers in ends.items() if layers is not None}


def written_out(layout: str) -> str:
    """Return a layout such as ``E|(t|)*2L`` without repeats: ``E|t|t|L``."""
    layout, repeated = layout.replace(",", ""), 1  # commas have no meaning
    while repeated:
        layout, repeated = _REPEATED.subn(
            lambda found: (found[1] or found[2]) * int(found[3]), layout
        )
    return layout


def stage_layers(args: Namespace) -> tuple[int, ...]:
    """Return the number of layers of each stage in Megatron's split."""
    ranks = args.pipeline_model_parallel_size
    if (layout := args.pipeline_model_parallel_layout) is not None:
        return tuple(stage.count("t") for stage in written_out(str(layout)).split("|"))
    segments = args.virtual_pipeline_model_parallel_size or 1
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    rest, others = num_layers(args) - sum(given_ends(args).values()), _ranks_without_flag(args)
    of_rank = [rest // others if others else 0] * ranks
    of_rank[0] = of_rank[0] if first is None else first
    of_rank[-1] = of_rank[-1] if last is None else last
    stages = [layers // segments for layers in of_rank] * segments
    stages[0] -= args.account_for_embedding_in_pipeline_split
    stages[-1] -= args.account_for_loss_in_pipeline_split
    return tuple(stages)


def recomputed_layers(args: Namespace) -> tuple[int, ...]:
    """Return how many layers each stage recomputes, with ``--recompute-method block`` alone."""
    if args.recompute_method != "block":
        return ()
    split, counts = stage_layers(args), getattr(args, "recompute_layers", None)
    if counts == "auto":
        return (0,) * len(split)
    return tuple(counts or (min(n, args.recompute_num_layers) for n in split))
