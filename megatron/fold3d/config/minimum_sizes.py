"""Sizes that must be at least one: with less, Megatron divides by zero or trains nothing."""

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
