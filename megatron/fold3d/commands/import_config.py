"""``fold3d import``: a Hugging Face configuration as Megatron's flags.

A field that no table here knows is refused, since the model might differ by it. If the field is
false or null it is only named, since what is off here might be on by default.
"""

import json
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.fold3d.commands.console import OK, complain, write
from megatron.fold3d.observe.fields import parse_json, read_as

EXAMPLE = "fold3d import Llama-3.1-8B/config.json"

# Says nothing about the function of the model, or is what `_MUST_BE` or `_flags` looks at.
_NO_MATTER = {
    *("architectures", "bos_token_id", "chunk_size_feed_forward", "dtype"),
    *("eos_token_id", "id2label", "initializer_range", "is_encoder_decoder"),
    *("label2id", "max_position_embeddings", "model_type", "name_or_path"),
    *("_name_or_path", "output_attentions", "output_hidden_states", "pad_token_id"),
    *("pretraining_tp", "problem_type", "return_dict", "torch_dtype"),
    *("transformers_version", "use_cache"),
}
# Fields that are a flag, by the models that have them.
_SIZES = {
    "num_hidden_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "intermediate_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "vocab_size": "--vocab-size",
    "rms_norm_eps": "--norm-epsilon",
}
_EXPERTS = {
    "num_local_experts": "--num-experts",
    "num_experts_per_tok": "--moe-router-topk",
    "router_aux_loss_coef": "--moe-aux-loss-coeff",
}
_QWEN_EXPERTS = {**_EXPERTS, "moe_intermediate_size": "--moe-ffn-hidden-size"}
_LATENT = {
    "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank",
    "qk_nope_head_dim": "--qk-head-dim",
    "qk_rope_head_dim": "--qk-pos-emb-head-dim",
    "v_head_dim": "--v-head-dim",
    "n_routed_experts": "--num-experts",
    "num_experts_per_tok": "--moe-router-topk",
    "moe_intermediate_size": "--moe-ffn-hidden-size",
    "aux_loss_alpha": "--moe-aux-loss-coeff",
}
_OPTIONAL = ("rms_norm_eps", "router_aux_loss_coef", "q_lora_rank", "aux_loss_alpha")
# Fields that are no flag by themselves, by the models that have them.
_COMMON = {
    *("num_key_value_heads", "head_dim", "rope_theta", "rope_parameters", "rope_scaling"),
    *("attention_dropout", "attention_bias", "hidden_act", "tie_word_embeddings"),
}
_WINDOW = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
_OF_DEEPSEEK = {
    *("first_k_dense_replace", "moe_layer_freq", "n_shared_experts", "n_group", "topk_group"),
    *("topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "seq_aux"),
    *("rope_interleave", "qk_head_dim", "mlp_bias", "output_router_logits"),
    *("num_nextn_predict_layers", "auto_map", "ep_size", "quantization_config"),
}
_V2, _V3, _GPT_OSS = "deepseek_v2", "deepseek_v3", "gpt_oss"
_LOGITS = "output_router_logits"
# Fields of each family, and the flags that all of its models need.
_FAMILIES: Mapping[str, tuple[Mapping[str, str], set[str], tuple[str, ...]]] = {
    "llama": ({}, {"mlp_bias"}, ()),
    "mistral": ({}, {"sliding_window"}, ()),
    "qwen2": ({}, {*_WINDOW, "use_mrope"}, ("--add-qkv-bias",)),
    "qwen3": ({}, _WINDOW, ("--qk-layernorm",)),
    "qwen3_moe": (
        _QWEN_EXPERTS,
        {*_WINDOW, "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", _LOGITS},
        ("--qk-layernorm",),
    ),
    _GPT_OSS: (
        _EXPERTS,
        {
            *("sliding_window", "layer_types", "swiglu_limit", "swiglu_alpha", _LOGITS),
            *("quantization_config", "initial_context_length", "experts_per_token"),
        },
        ("--quick-geglu", "--glu-linear-offset 1", "--softmax-type learnable"),
    ),
    "mixtral": (_EXPERTS, {"router_jitter_noise", _LOGITS, "sliding_window"}, ()),
    **dict.fromkeys((_V2, _V3), (_LATENT, _OF_DEEPSEEK, ())),
}
_BUT_GPT_OSS = ("--swiglu", "--position-embedding-type rope", "--disable-bias-linear")
# The only value of a field that Megatron has too, or a test for such values; and the rule in words.
_MUST_BE: Mapping[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "silu, which --swiglu computes"),
    "attention_bias": (False, "false: Megatron has one flag for all biases"),
    "mlp_bias": (False, "false: Megatron has one flag for all biases"),
    "use_sliding_window": (False, "false: attention sees the whole sequence"),
    "use_mrope": (False, "false: positions are those of text"),
    "layer_types": (
        lambda value: all(kind == "full_attention" for kind in value),
        "full_attention for every layer",
    ),
    "router_jitter_noise": (0, "0: Megatron's noise is another"),
    "pretraining_tp": (1, "1"),
    "is_encoder_decoder": (False, "false: pretrain_gpt.py trains decoders"),
}
_RULES_OF_GPT_OSS: Mapping[str, tuple[Any, str]] = {
    "attention_bias": (True, "true: all of its linear layers have biases"),
    "swiglu_alpha": (1.702, "1.702, which --quick-geglu has"),
    "layer_types": (
        lambda value: all(kind in ("full_attention", "sliding_attention") for kind in value),
        "full_attention or sliding_attention for every layer",
    ),
}
# What values are, where a rule or a flag counts on it.
_OBJECTS, _LISTS = {"rope_parameters", "rope_scaling"}, {"layer_types", "mlp_only_layers"}
_NUMBERS = {"attention_dropout", "aux_loss_alpha", "rms_norm_eps", "router_aux_loss_coef"}
_NUMBERS |= {"routed_scaling_factor", "swiglu_limit"}
_WHOLE = {*_SIZES, *_QWEN_EXPERTS, *_LATENT, "decoder_sparse_step", "first_k_dense_replace"}
_WHOLE |= {"head_dim", "max_position_embeddings", "n_group", "n_shared_experts", "topk_group"}
_WHOLE |= {"num_key_value_heads", "num_nextn_predict_layers", "sliding_window"}
_LATENT_EPSILON = 1e-6
# How Megatron stretches rotary positions, plain and latent: the kind, its fields that are flags,
# and what it has built in.
_LLAMA3 = (
    "llama3",
    {"factor": "--use-rope-scaling --rope-scaling-factor"},
    {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
)
_YARN_OF_GPT_OSS = (
    "yarn",
    {
        "factor": "--position-embedding-type yarn --no-yarn-correction-range-round-to-int "
        "--rotary-scaling-factor",
        "beta_fast": "--yarn-beta-fast",
        "beta_slow": "--yarn-beta-slow",
        "original_max_position_embeddings": "--yarn-original-max-position-embeddings",
    },
    {"truncate": False},
)
_YARN = (
    "yarn",
    {
        "factor": "--rope-type yarn --rotary-scaling-factor",
        "mscale": "--mscale",
        "mscale_all_dim": "--mscale-all-dim",
    },
    {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096},
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("config", type=Path, metavar="FILE", help="a config.json")
    parser.add_argument("--json", action="store_true", help="the flags as a list, in JSON")


def run(args: Namespace) -> int:
    """Print the flags; returns the exit code."""
    found, flags = read_as(args.config, _parsed)
    write((json.dumps(flags) if args.json else shlex.join(flags)) + "\n")
    for remark in remarks(found):
        complain(remark)
    return OK


def _parsed(text: str) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return a configuration and its flags."""
    try:
        found = parse_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}; give a model's config.json") from None
    if not isinstance(found, dict):
        raise ValueError(f"holds a {type(found).__name__}; a configuration is an object")
    return found, megatron_flags(found)


def megatron_flags(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the flags of a model with the same function, one word each.

    Args:
        config: as `transformers` writes it, or DeepSeek.

    Raises:
        ValueError: the family or a field is not known, or a value has no counterpart.
    """
    config = {name: value for name, value in config.items() if value is not None}
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        found = f"model_type={family!r}" if family != "None" else "no model_type"
        raise ValueError(f"found {found}; it is one of {', '.join(sorted(_FAMILIES))}")
    own, _, switches = _FAMILIES[family]
    if own is _QWEN_EXPERTS and "num_experts" in config:  # in files, not in `transformers`
        config = {"num_local_experts" if n == "num_experts" else n: config[n] for n in config}
    sizes = {**_SIZES, **own}
    _check_kinds(config)
    if unknown := [name for name in _unknown(config) if not _is_off(config[name])]:
        raise ValueError(
            f"unknown fields {', '.join(unknown)}: a {family} of Megatron's might differ by them; "
            "drop those that are not used"
        )
    needed = [*sizes, *(["topk_group"] if own is _LATENT and _has_groups(config) else ())]
    if missing := [n for n in needed if not config.get(n) and n not in _OPTIONAL]:
        raise ValueError(f"lacks {', '.join(missing)}")
    must_be = {**_MUST_BE, **(_rules_of_deepseek(config) if own is _LATENT else {})}
    if family == _GPT_OSS:
        must_be |= _RULES_OF_GPT_OSS
    elif config.get("use_sliding_window", True):
        must_be["sliding_window"] = None, "null: attention sees the whole sequence"
    for name, (known, rule) in must_be.items():
        if (value := config.get(name)) is None:
            continue
        if not (known(value) if callable(known) else value == known):
            raise ValueError(f"found {name}={value!r}; it has to be {rule}")
    always = ("--normalization RMSNorm", *(() if family == _GPT_OSS else _BUT_GPT_OSS))
    words = [*always, *switches, *_flags(config, own)]
    return tuple(word for flag in words for word in flag.split())


def _check_kinds(config: Mapping[str, Any]) -> None:
    for names, kinds, rule in (
        (_OBJECTS, (dict,), "an object"),
        (_LISTS, (list,), "a list"),
        (_WHOLE - _NUMBERS, (int,), "a whole number that is not below zero"),
        (_NUMBERS, (int, float), "a number that is not below zero"),
    ):
        for name in sorted(names & config.keys()):
            value, is_number = config[name], int in kinds
            if type(value) not in kinds or (is_number and not value >= 0):
                raise ValueError(f"found {name}={value!r}; it has to be {rule}")


def remarks(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what may differ from the model that a configuration is of."""
    if off := _unknown(config):
        yield f"taken as unused, since they are false or empty: {', '.join(off)}"
    epsilon = config.get("rms_norm_eps", _LATENT_EPSILON)
    if "kv_lora_rank" in config and epsilon != _LATENT_EPSILON:
        yield (
            f"rms_norm_eps={epsilon} is that of latent vectors too, where transformers has "
            f"{_LATENT_EPSILON}: Megatron has one for all norms"
        )


def _unknown(config: Mapping[str, Any]) -> list[str]:
    own, others, _ = _FAMILIES[config["model_type"]]
    return sorted(config.keys() - _SIZES.keys() - own.keys() - _COMMON - others - _NO_MATTER)


def _is_off(value: object) -> bool:
    return value is False or value in ("", [], {})


def _flags(config: Mapping[str, Any], own: Mapping[str, str]) -> Iterator[str]:
    latent = own is _LATENT
    yield from _given(config, _SIZES if latent else {**_SIZES, **own})
    # Megatron's defaults are others.
    yield f"--hidden-dropout 0 --attention-dropout {config.get('attention_dropout') or 0}"
    yield f"--max-position-embeddings {config.get('max_position_embeddings', 2048)}"
    yield from (_of_deepseek if latent else _heads)(config)
    if own is _QWEN_EXPERTS:
        yield from _of_qwen_experts(config)
    if is_gpt_oss := config["model_type"] == _GPT_OSS:
        yield from _of_gpt_oss(config)
    if not config.get("tie_word_embeddings", False):
        yield "--untie-embeddings-and-output-weights"
    known = _YARN if latent else _YARN_OF_GPT_OSS if is_gpt_oss else _LLAMA3
    yield from _rotary(config, *known)


def _given(config: Mapping[str, Any], flags: Mapping[str, str]) -> Iterator[str]:
    """Yield the flags of the fields that a configuration has, with their values."""
    return (f"{flags[n]} {config[n]}" for n in flags if config.get(n) is not None)


def _heads(config: Mapping[str, Any]) -> Iterator[str]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if (groups := config.get("num_key_value_heads") or heads) != heads:
        yield f"--group-query-attention --num-query-groups {groups}"
    if (size := config.get("head_dim") or hidden // heads) * heads != hidden:
        yield f"--kv-channels {size}"


def _of_qwen_experts(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield which layers have experts, and what their weights sum up to."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    has_experts = [
        int(layer not in dense and step > 0 and (layer + 1) % step == 0)
        for layer in range(config["num_hidden_layers"])
    ]
    if not all(has_experts):
        yield f"--moe-layer-freq {str(has_experts).replace(' ', '')}"
    if not config.get("norm_topk_prob", False):
        yield "--moe-router-pre-softmax"


def _of_gpt_oss(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the clamp of gates, and the windows of attention, which see a token itself too."""
    yield f"--activation-func-clamp-value {config.get('swiglu_limit', 7.0)}"
    kinds = config.get("layer_types") or ()
    has_window = [int(kind == "sliding_attention") for kind in kinds]
    pattern = str(has_window).replace(" ", "")
    if has_window == [(layer + 1) % 2 for layer in range(config["num_hidden_layers"])] or not kinds:
        pattern = "2"
    if size := config.get("sliding_window", 128):
        yield f"--window-size {size - 1},0 --window-attn-skip-freq {pattern}"


def _rotary(
    config: Mapping[str, Any], known: str, flags: Mapping[str, str], built_in: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the base of rotary embeddings, and how they are stretched."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = rope.pop("rope_theta", config.get("rope_theta") or 10_000)
    if not isinstance(base, int | float) or base % 1 != 0:
        raise ValueError(f"found rope_theta={base}; --rotary-base is a whole number")
    yield f"--rotary-base {int(base)}"
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if kind == "default" and not rope:
        if flags is _YARN[1]:
            yield "--rope-type rope"  # yarn is its default
        if flags is _YARN_OF_GPT_OSS[1]:
            yield "--position-embedding-type rope"
        return
    rest = {name: value for name, value in rope.items() if name not in flags}
    if flags is _YARN[1]:  # where fields may be left out
        rest = {**built_in, **rest}
    if kind != known or rest != built_in or None in map(rope.get, flags):
        raise ValueError(
            f"found rope_type={kind!r} with {rope}; Megatron has default, and {known} with "
            f"{', '.join(flags)} and {built_in}"
        )
    yield from _given(rope, flags)


def _of_deepseek(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags of latent attention, experts and routing."""
    yield "--multi-latent-attention --qk-layernorm"
    yield from _given(config, _LATENT)
    if num_dense := config.get("first_k_dense_replace"):
        yield f"--moe-layer-freq ([0]*{num_dense}+[1]*{config['num_hidden_layers'] - num_dense})"
    if num_shared := config.get("n_shared_experts"):
        width = num_shared * config["moe_intermediate_size"]
        yield f"--moe-shared-expert-intermediate-size {width}"
    if config.get("seq_aux"):
        yield "--moe-router-load-balancing-type seq_aux_loss"
    if config["model_type"] == _V3:
        yield "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    else:
        yield "--moe-router-pre-softmax"
    if (scale := config.get("routed_scaling_factor", 1.0)) != 1.0:
        yield f"--moe-router-topk-scaling-factor {scale}"
    if _has_groups(config):
        yield f"--moe-router-num-groups {config['n_group']}"
        yield f"--moe-router-group-topk {config['topk_group']}"
    if num_further := config.get("num_nextn_predict_layers"):
        yield f"--mtp-num-layers {num_further}"


def _rules_of_deepseek(config: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    """Return the rows of `_MUST_BE` that depend on other fields.

    Megatron scores a group of experts by as many of its experts as a token takes of a group,
    DeepSeek-V2 by the best one, DeepSeek-V3 by the two best. Numbers for which they differ are
    refused.
    """
    is_v3 = config["model_type"] == _V3
    best = 2 if is_v3 else 1  # experts by which the model scores a group
    heads, taken = config["num_attention_heads"], config["num_experts_per_tok"]
    score = "sigmoid" if is_v3 else "softmax"
    greedy = "group_limited_greedy" if _has_groups(config) else "greedy"
    method = "noaux_tc" if is_v3 else greedy
    return {
        "num_key_value_heads": (
            heads,
            f"num_attention_heads, {heads}: every head has keys of its own",
        ),
        "rope_interleave": (True, "true: Megatron rotates pairs of neighbours"),
        "scoring_func": (score, f"{score} for {config['model_type']}"),
        "topk_method": (method, f"{method} where n_group={config.get('n_group')}"),
        "norm_topk_prob": (is_v3, f"{str(is_v3).lower()}: Megatron's {score} router does so"),
        "moe_layer_freq": (1, "1: all layers after the dense ones"),
        "topk_group": (
            lambda value: not _has_groups(config) or taken // value == best,
            f"num_experts_per_tok / {best}, which is {taken / best:g}: a group is scored by its "
            f"best {'two' if is_v3 else 'one'}",
        ),
    }


def _has_groups(config: Mapping[str, Any]) -> bool:
    return (config.get("n_group") or 1) > 1
