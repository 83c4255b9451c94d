"""``--offload-activations`` and ``--lazy-inter-segment``, and the options that they exclude."""

from argparse import Namespace
from collections.abc import Iterator
from typing import get_args

from megatron.fold3d.config.argument_group import ArgumentGroup
from megatron.fold3d.config.fold3d_config import Offload
from megatron.fold3d.config.layer_split import layers_per_rank

_BY_ENGINE = ("mlp", "moe", "shared_experts")  # modules of selective recomputation with fp8 or fp4


def add_offload_flags(group: ArgumentGroup) -> None:
    """Add the flags that send activations to host memory, and transfers through it."""
    group.add_argument(
        "--offload-activations",
        choices=get_args(Offload),
        default="off",
        help="Keep saved activations in host memory until their backward needs them: on moves all "
        "large ones, auto the inputs of recomputation, and no more of them than the GPU's memory "
        "needs and its copy engine hides (default: off).",
    )
    group.add_argument(
        "--lazy-inter-segment",
        action="store_true",
        help="Send tensors from the last pipeline rank to the first through host memory, where "
        "they wait until they are used.",
    )


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


def _recomputed_by_engine(args: Namespace) -> str:
    """Return what Transformer Engine recomputes with fp8 or fp4; empty if nothing."""
    if args.recompute_granularity == "full":
        return "full recomputation"
    modules = [module for module in args.recompute_modules or () if module in _BY_ENGINE]
    return f"--recompute-modules {' '.join(modules)}" if modules else ""


def offload_problems(args: Namespace, schedule: str, num_segments: int) -> Iterator[str]:
    """Yield one message (found, rule, fix) for each setting that offloading cannot run with."""
    if args.lazy_inter_segment and schedule == "stock":
        yield "--lazy-inter-segment with --schedule stock: it sends itself; give --schedule aiao"
    elif args.lazy_inter_segment and num_segments == 1:
        yield (
            "--lazy-inter-segment with one segment: nothing goes from the last rank to the first; "
            "drop it, or give --segments 2 or more"
        )
    if args.offload_activations == "off":
        return
    found = f"--offload-activations {args.offload_activations}"
    if schedule == "stock":
        yield (
            f"{found} with --schedule stock: the copies are actions of a plan; give --schedule aiao"
        )
        return
    if args.distribute_saved_activations:
        yield (
            f"{found} with --distribute-saved-activations: it puts shards together in the tensors "
            "that they were cut from, which have left; use --sequence-parallel, which saves "
            "shards of its own"
        )
    if args.fp8 or args.fp4:
        precision = f"--fp8-format {args.fp8}" if args.fp8 else f"--fp4-format {args.fp4}"
        if recomputed := _recomputed_by_engine(args):
            yield (
                f"{found} with {precision} and {recomputed}: Transformer Engine then "
                "recomputes by a checkpoint of its own, whose inputs nothing would offload; use "
                "--recompute-granularity selective with other modules than "
                f"{', '.join(_BY_ENGINE)}, or drop one of the two"
            )
    # Megatron's validation replaces the short form by the long one and deletes its attribute.
    recomputes = args.recompute_granularity or getattr(args, "recompute_activations", False)
    if not recomputes and not offloads_everything(args):
        yield (
            f"{found} without recomputation: what it starts from would leave, and there is none; "
            "add --recompute-granularity full or selective, or give --offload-activations on "
            "--no-gradient-accumulation-fusion"
        )
