"""Sizes of a run: those that must be at least one, and what follows from them.

With less than one, Megatron divides by zero or trains nothing.
"""

import math
from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.spelling import flag_of

# Attributes of Megatron's namespace; each is named as its flag is.
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
    "make_vocab_size_divisible_by",
    "distributed_timeout_minutes",
)


def size_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) for each given size below one."""
    for name in _SIZES:
        if (size := getattr(args, name, None)) is not None and size < 1:
            yield f"{flag_of(name)} {size}: it is at least one; give another number"


def ranks_of_model(args: Namespace) -> int:
    """Return the ranks that one replica of the model takes."""
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    return int(math.prod((*sizes, args.context_parallel_size)))


def num_replicas(args: Namespace) -> int:
    """Return the most ranks that hold the same parameters; 0 until their number is known.

    Ranks that share a sequence hold the same layers, and reduce gradients as replicas do. An expert
    may have more replicas than other layers: tensor-parallel ranks share a layer, and need not
    share an expert.

    Args:
        args: Megatron's namespace, with the number of data-parallel ranks once it is known.
    """
    dense = (getattr(args, "data_parallel_size", None) or 0) * args.context_parallel_size
    if not args.num_experts:
        return int(dense)
    in_layer = args.tensor_model_parallel_size
    in_expert = args.expert_tensor_parallel_size or in_layer
    return int(max(dense, dense * in_layer // (in_expert * args.expert_model_parallel_size)))


def num_microbatches(args: Namespace) -> int:
    """Return the micro-batches of an iteration after ramp-up, of parsed or validated flags."""
    at_once = args.micro_batch_size * max(1, args.world_size // ranks_of_model(args))
    return max(1, int((args.global_batch_size or at_once) // at_once))
