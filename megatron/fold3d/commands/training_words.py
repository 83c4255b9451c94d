"""A training's own flags, Megatron's and ours, read as words into Megatron's namespace.

Nothing is run, and no Megatron is needed: its flags and defaults stand in a file, which
scripts/print_megatron_flags.py prints. What is no flag of either is the script's own, and passed
over. Commands take short forms beside them.
"""

import json
from argparse import ArgumentError, ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any, get_args

from megatron.fold3d.commands.console import suggestion
from megatron.fold3d.commands.training_flags import layout_of
from megatron.fold3d.config.all_flags import add_arguments
from megatron.fold3d.config.gpu_settings import has_fusion_kernel
from megatron.fold3d.config.recompute_flags import counts_or_auto
from megatron.fold3d.config.schedule_flags import word_of
from megatron.fold3d.config.settings import asked
from megatron.fold3d.config.spelling import flag_of, typed
from megatron.fold3d.plan.choice import file_of
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.predict.cost_model.presets import FIELDS
from megatron.fold3d.predict.cost_model.sizes import Recompute

MEGATRON_FLAGS = Path(__file__).parent / "megatron_flags.json"
KINDS: Mapping[str, Mapping[str, Any]] = {
    "true": {"action": "store_true"},
    "false": {"action": "store_false"},
    "int": {"type": int},
    "float": {"type": float},
    "str": {},
}
"""How a flag of each kind is given; `MEGATRON_FLAGS` names the kind, or lists the values."""
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
"""Fields of a shape with multi-latent attention."""
_IF_ASKED = ("num_query_groups", "rotary_base", "moe_router_topk", *LATENT)
SIZES = {name: field for name, field in FIELDS.items() if name not in _IF_ASKED}
"""Fields of a shape that one flag gives, by Megatron's attribute."""
NOT_MODELLED = {
    **dict.fromkeys(
        ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model"),
        "layers that are no transformer's",
    ),
    "experimental_attention_variant": "other attention than a transformer's",
    "spec": "layers of a specification of your own",
    "decoder_num_layers": "an encoder with a decoder",
    "mtp_num_layers": "the layers of multi-token prediction",
    "heterogeneous_layers_config_path": "layers that differ",
    "heterogeneous_layers_config_encoded_json": "layers that differ",
    "yaml_cfg": "a file of options",
}
# Flags that change memory or time, and that no prediction counts.
_NOT_COUNTED = (
    *("window_size", "moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"),
    *("cpu_offloading_num_layers", "mlp_chunks_for_training", "cuda_graph_impl"),
    *("te_precision_config_file", "moe_pad_expert_input_to_capacity"),
    *("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
    *("moe_layer_recompute", "moe_paged_stash", "fp32_residual_connection"),
    *("cross_entropy_loss_fusion", "fp16_lm_cross_entropy", "fine_grained_activation_offloading"),
    *("distribute_saved_activations", "use_precision_aware_optimizer", "fp8_param_gather"),
    *("fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "hybrid_context_parallel"),
    *("tp_comm_overlap", "delay_wgrad_compute", "moe_shared_expert_overlap"),
)
_DROPOUTS = ("attention_dropout", "hidden_dropout")
_SHORT = {
    "model": "a model that the planner knows, in 16 bits",
    "pp": "--pipeline-model-parallel-size",
    "tp": "--tensor-model-parallel-size, with --sequence-parallel",
    "dp": "replicas (default: what the cluster's GPUs are enough for)",
    "microbatches": "of each replica, in place of --global-batch-size: DP.sync overlaps, and "
    "nothing draws dropout",
    "layers": "of each stage, in place of --pipeline-model-parallel-layout; auto is what makes the "
    "iteration shortest",
    "recompute": "none, selective or full, in place of --recompute-granularity",
    "fp32": "train in 32 bits",
}
_OURS = (
    *("--schedule", "--segments", "--shard-segments", "--preemptive-comm", "--microbatches"),
    *("--recompute-layers", "--offload-activations", "--lazy-inter-segment", "--model-preset"),
)
_MISSPELT = 0.85  # Megatron's own flags are less like ours


def read_words(words: Sequence[str], typed: Sequence[str] = ()) -> Namespace:
    """Return the namespace of a training's flags.

    Args:
        words: the flags of a training, of which some may be its script's own.
        typed: flags that a user has typed for a command. All are known; they override the others.

    Raises:
        ValueError: a value cannot be, a typed flag is not known, or another is nearly one of ours.
    """
    parser = _parser()
    args = Namespace()
    try:
        _, others = parser.parse_known_args(list(_with_values(parser, words)), args)
        _, unknown = parser.parse_known_args(typed, args)
    except ArgumentError as error:
        raise ValueError(str(error)) from None
    for word in (other for other in others if other.startswith("--")):
        if near := get_close_matches(word.partition("=")[0], _OURS, 1, _MISSPELT):
            raise ValueError(f"there is no {word}; did you mean {near[0]}?")
    if unknown:
        hint = suggestion(unknown, parser._option_string_actions)
        if unknown[0].startswith("--"):
            hint = hint or "; flags that are your script's own stand behind --"
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    _write_out(args)
    return args


def flags_of_trainings(words: Iterable[str]) -> list[str]:
    """Return the words that are flags of Megatron or of ours, or short forms of them."""
    known = _parser()._option_string_actions
    return [word for word in words if word.partition("=")[0] in known]


def unread(words: Sequence[str], typed: Sequence[str]) -> Mapping[str, str]:
    """Return the flags whose last value is the script's and could not be read, with this value.

    Args:
        words: as of `read_words`, with a dollar sign where a part could not be read.
    """
    known = _parser()._option_string_actions
    return {
        flag: last
        for flag, (*_, last) in values_of(words).items()
        if flag in known and known[flag].nargs != 0 and "$" in last and flag not in typed
    }


def values_of(words: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return the values of each flag, which may be given several times; the last one counts."""
    values = defaultdict[str, list[str]](list)
    for word, following in pairwise((*words, "--")):
        flag, is_whole, value = word.partition("=")
        values[flag].append(value if is_whole else following)
    return values


def not_counted(args: Namespace) -> Iterator[str]:
    """Yield the flags of a model that change memory or time, and that no prediction counts."""
    for name in _NOT_COUNTED:
        default = _parser().get_default(name)
        if getattr(args, name, default) not in (None, default):
            yield flag_of(name)
    yield from (
        flag_of(name)
        for name in (
            "tensor_parallel_num_weight_shards",
            "expert_tensor_parallel_num_weight_shards",
        )
        if asked(args, f"{flag_of(name)} above the ranks")
    )


def help_of_flags(rule: str) -> str:
    """Return what a command's help says of a training's flags; ``rule`` is the command's own."""
    text = (
        "Megatron's and ours, such as --schedule and --segments; behind -- also those of your own "
        f"script{f'; {rule}' if rule else ''}. Short forms:"
    )
    rows = (f"--{name}: {what}" for name, what in _SHORT.items())
    return "\n".join(
        line
        for row in (text, *rows)
        for line in wrap(row, 76, subsequent_indent="  ", break_on_hyphens=False)
    )


@cache
def _parser() -> ArgumentParser:
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_arguments(parser)
    flags = json.loads(MEGATRON_FLAGS.read_text(encoding="utf-8"))
    for flag, (name, kind, number, default) in flags.items():
        several = {} if number is None else {"nargs": number}
        given = KINDS[kind] if isinstance(kind, str) else {"choices": kind, "type": type(kind[0])}
        parser.add_argument(flag, dest=name, default=default, **given, **several)
    for name in ("pp", "tp", "dp", "microbatches"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--model")
    parser.add_argument("--layers", type=counts_or_auto)
    parser.add_argument("--recompute", choices=get_args(Recompute))
    parser.add_argument("--fp32", action="store_true")
    parser.set_defaults(**dict.fromkeys(_DROPOUTS))  # `_write_out` looks whether they are given
    return parser


def _with_values(parser: ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    """Yield the words, but none that could not be read, and no known flag without its value."""
    known = parser._option_string_actions
    for word, following in pairwise((*words, "--")):
        takes_value = word in known and known[word].nargs != 0 and known[word].nargs != "?"
        lacks_value = following.startswith("--") or "$" in following
        if not (takes_value and lacks_value) and "$" not in word:
            yield word


def _write_out(args: Namespace) -> None:
    """Set the attributes that short forms, and our flags, stand for."""
    for short, name in (
        ("tp", "tensor_model_parallel_size"),
        ("pp", "pipeline_model_parallel_size"),
    ):
        if (size := getattr(args, short)) is not None:
            setattr(args, name, size)
    if args.tp is not None:
        args.sequence_parallel = args.tp > 1
    has_plan = file_of(word_of(args).order) is not None and args.global_batch_size is None
    if args.microbatches is not None or has_plan:  # a schedule, and no training
        args.overlap_grad_reduce = True
        args.overlap_param_gather = args.use_distributed_optimizer
    for name in _DROPOUTS:
        if getattr(args, name) is None:
            setattr(args, name, 0.1 if args.microbatches is None else 0.0)
    if args.recompute is not None:
        args.recompute_granularity = None if args.recompute == "none" else args.recompute
    if args.transformer_impl == "local" and not has_fusion_kernel():  # as training assumes
        args.gradient_accumulation_fusion = False
    if args.recompute_activations and args.recompute_granularity is None:
        args.recompute_granularity = "selective"
    if isinstance(args.layers, tuple) and args.segments != AUTO:
        stages = args.pipeline_model_parallel_size * (args.segments or 1)
        if len(args.layers) != stages:
            raise ValueError(
                f"{typed('--layers', args.layers)}: a plan of {stages} stages needs as many "
                "numbers; give such"
            )
        args.pipeline_model_parallel_layout = layout_of(args.layers)
