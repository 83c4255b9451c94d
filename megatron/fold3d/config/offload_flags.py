"""``--offload-activations``: what leaves, what comes back by recomputation, and how many bytes."""

from argparse import Namespace

from megatron.fold3d.config.layer_split import layers_per_rank
from megatron.fold3d.config.spelling import typed

_BY_ENGINE = ("mlp", "moe", "shared_experts")  # modules of selective recomputation with fp8 or fp4


def offloads_everything(args: Namespace) -> bool:
    """Return True to offload all large saved tensors, False for the inputs of recomputation only.

    Autograd's saved-tensor hooks return a weight without the attributes that Megatron's fused
    weight-gradient kernel needs. So with that kernel the hooks cannot cover most of a forward.
    """
    return args.offload_activations == "on" and not args.gradient_accumulation_fusion


def saved_bytes(args: Namespace, num_segments: int) -> int:
    """Return a lower bound on the bytes that one micro-batch's forward of a stage offloads.

    Where layers are split evenly, some of them are known before anything has run: with full
    recomputation one hidden state per layer, or group of layers, and each layer's input where all
    large saved tensors are offloaded. Otherwise it is 0.
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
