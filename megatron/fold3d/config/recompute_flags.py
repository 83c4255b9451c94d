"""``--recompute-layers`` and ``--offload-activations``: their values, bytes and limits."""

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator

from megatron.fold3d.config.job_sizes import given_ends, layers_per_rank
from megatron.fold3d.config.schedule_flags import word_of
from megatron.fold3d.config.spelling import typed
from megatron.fold3d.plan.schedule_word import AUTO, STOCK

_FLAG = "--recompute-layers"
_LIMIT = "--activation-memory-bytes"
_BY_ENGINE = ("mlp", "moe", "shared_experts")  # modules of selective recomputation with fp8 or fp4
_KEEP_MEANS = {"global_aux_loss", "quantile_balancing"}


def counts_or_auto(text: str) -> tuple[int, ...] | str:
    """Read numbers of layers, one for each stage and separated by commas, or auto."""
    if text == AUTO:
        return text
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise ArgumentTypeError(
            f"{text!r} is neither a list of numbers of layers such as 4,3,3,2 nor {AUTO}"
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


def recompute_count_problems(args: Namespace, num_segments: int) -> Iterator[str]:
    """Yield one message (found, rule, fix) per impossible number of layers, or limit of memory."""
    yield from _limit_problems(args)
    counts = args.recompute_layers
    if counts in (None, AUTO) or args.segments == AUTO or word_of(args).order == STOCK:
        return
    found, num_stages = typed(_FLAG, counts), args.pipeline_model_parallel_size * num_segments
    if len(counts) != num_stages:
        yield (
            f"{found}: these are {len(counts)} numbers, one for each stage, and the plan has "
            f"{num_stages} stages; give as many"
        )
    else:
        yield from _too_many(args, found, num_segments)


def _limit_problems(args: Namespace) -> Iterator[str]:
    """Refuse an unused limit, one below a byte, and ``auto`` on a CPU without a limit."""
    limit, auto = args.activation_memory_bytes, args.recompute_layers == AUTO
    if limit is not None and not auto and args.offload_activations == "off":
        yield (
            f"{_LIMIT} {limit} without {_FLAG} auto or --offload-activations: only these use the "
            "limit; drop it, or add one of them"
        )
    elif limit is not None and limit < 1:
        yield f"{_LIMIT} {limit}: saved activations take some bytes; give at least 1"
    elif limit is None and auto and args.device == "cpu":
        yield (
            f"{_FLAG} auto with --device cpu: a CPU has no device memory to measure; "
            f"give {_LIMIT} N"
        )


def _too_many(args: Namespace, found: str, num_segments: int) -> Iterator[str]:
    """Refuse numbers above the layers of a stage, if all stages have equally many."""
    if args.pipeline_model_parallel_layout is not None or given_ends(args):
        return  # the executor compares them with the built model
    per_rank = layers_per_rank(args) if args.num_layers else ()
    if not per_rank or per_rank[0] % num_segments:
        return
    layers = per_rank[0] // num_segments
    for stage, number in enumerate(args.recompute_layers):
        if number > layers:
            yield (
                f"{found}: {number} layers of stage {stage} are to be recomputed, and a stage has "
                f"{layers}; give at most as many"
            )
            return


def offloads_everything(args: Namespace) -> bool:
    """Return True to offload all large saved tensors, False for the inputs of recomputation only.

    Autograd's saved-tensor hooks return a weight without the attributes that Megatron's fused
    weight-gradient kernel needs. So with this kernel most saved tensors stay on the device.
    """
    return args.offload_activations == "on" and not args.gradient_accumulation_fusion


def saved_bytes(args: Namespace, num_segments: int) -> int:
    """Return a lower bound on the bytes that one micro-batch's forward of a stage offloads.

    With an even split, the bound is one hidden state per layer, or per group of layers with full
    recomputation. It is 0 with an uneven split, or if neither full recomputation nor
    `offloads_everything` is on.
    """
    sizes = (args.num_layers, args.seq_length, args.micro_batch_size, args.hidden_size)
    per_rank = layers_per_rank(args) if args.num_layers else ()
    if (
        not (per_rank and num_segments)
        or args.pipeline_model_parallel_layout is not None
        or None in sizes
    ):
        return 0
    stages = args.pipeline_model_parallel_size * num_segments
    num_saved = min(args.num_layers // stages, min(per_rank) // num_segments)
    if args.recompute_granularity == "full" and args.recompute_num_layers is not None:
        at_once: int = args.recompute_num_layers
        by_groups = args.recompute_method == "uniform"
        num_saved = -(-num_saved // at_once) if by_groups else min(num_saved, at_once)
    elif not offloads_everything(args):
        return 0
    elements = args.seq_length * args.micro_batch_size * args.hidden_size
    shards = args.context_parallel_size
    if args.sequence_parallel:
        shards *= args.tensor_model_parallel_size
    return int(num_saved * elements // shards * (2 if args.bf16 or args.fp16 else 4))


def engine_modules(args: Namespace) -> str:
    """Return the modules that Transformer Engine recomputes by itself with fp8 or fp4, if any."""
    modules = [module for module in args.recompute_modules or () if module in _BY_ENGINE]
    return typed("--recompute-modules", modules) if modules else ""


def recomputes(args: Namespace) -> bool:
    """Return True if backwards compute anything again."""
    # Megatron's validation replaces the short form by the long one and deletes its attribute.
    return bool(args.recompute_granularity or getattr(args, "recompute_activations", False))
