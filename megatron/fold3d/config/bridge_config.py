"""From the configuration of Megatron-Bridge to Megatron's namespace: `read_bridge`.

Bridge has no flags. The parts of its ``ConfigContainer`` are Megatron's own configurations, which
Megatron fills from flags, field by field. Here the fields are turned back into flags, so one set of
rules serves both. A flag without a field in Bridge keeps its default.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

# If several parts have a field, the last part counts.
_PARTS = (
    *("tokenizer", "dataset", "scheduler", "logger", "checkpoint", "rng", "dist", "profiling"),
    *("rerun_state_machine", "train", "validation", "optimizer", "ddp", "model"),
)
# Flags whose attribute and field have different names.
_RENAMED = {
    "average_in_collective": "ddp_average_in_collective",
    "bucket_size": "ddp_bucket_size",
    "fp4_param": "fp4_param_gather",
    "fp8_param": "fp8_param_gather",
    "gated_linear_unit": "swiglu",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "num_moe_experts": "num_experts",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
}
_UNREAD = "overlap_p2p_comm"  # not read: a plan's transfers overlap in any case
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}  # for a layout's layers


def read_bridge(config: Any, args: Namespace) -> Namespace:
    """Return a namespace with the fields of a ``ConfigContainer``, before or after its validation.

    Args:
        config: Bridge's ``ConfigContainer``, or Megatron's ``PretrainConfigContainer``.
        args: the defaults of all flags, and our flags as given.
    """
    found: dict[str, Any] = {}
    for part in _PARTS:
        values = dict(_values(getattr(config, part)))
        found |= {_RENAMED.get(name, name): value for name, value in values.items()}
    del found[_UNREAD]
    kind, heads, layout = (
        found[name]
        for name in ("cp_comm_type", "num_query_groups", "pipeline_model_parallel_layout")
    )
    restart, segments = config.inprocess_restart, found["virtual_pipeline_model_parallel_size"]
    group, ranks = (
        found[name]
        for name in ("microbatch_group_size_per_vp_stage", "pipeline_model_parallel_size")
    )
    derived = {
        "cp_comm_type": kind if isinstance(kind, list) else [kind],
        "data_parallel_size": getattr(config, "data_parallel_size", None),
        "group_query_attention": heads not in (None, found["num_attention_heads"]),
        "inprocess_restart": bool(restart and restart.enabled),
        "microbatch_group_size_per_vp_stage": None if group == ranks else group,  # the default
        "num_virtual_stages_per_pipeline_rank": None if layout else segments,
        "of_bridge": True,
        "pipeline_model_parallel_layout": _text(layout),
        "untie_embeddings_and_output_weights": not found["share_embeddings_and_output_weights"],
    }
    return Namespace(**vars(args) | found | derived)


def _values(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a configuration, and of its ``transformer`` if it has one."""
    for field in fields(part) if is_dataclass(part) else ():
        value = getattr(part, field.name, None)
        if field.name == "transformer":
            yield from _values(value)
        else:
            yield field.name, value


def _text(layout: Any) -> str | None:
    """Return a layout as the text of its flag, with one letter for each layer."""
    given = getattr(layout, "input_data", layout)
    if given is None or isinstance(given, str):
        return given
    kinds = ((getattr(layer, "name", layer) for layer in stage) for stage in given)
    return "|".join("".join(_LETTERS[kind.strip().lower()] for kind in stage) for stage in kinds)
