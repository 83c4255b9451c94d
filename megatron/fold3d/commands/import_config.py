"""``fold3d import``: a Hugging Face configuration as Megatron's flags."""

import json
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.fold3d.commands.console import OK, write
from megatron.fold3d.commands.deepseek_flags import (
    FIELDS,
    NEEDED,
    V2,
    V3,
    deepseek_flags,
    rules,
    yarn_flags,
)
from megatron.fold3d.observe.fields import parse_json, read_text

EXAMPLE = "fold3d import Llama-3.1-8B/config.json"

# Says nothing about the function of the model, or is what `_must_be` or `_flags` looks at.
_NO_MATTER = frozenset(
    (
        *("architectures", "bos_token_id", "chunk_size_feed_forward", "dtype"),
        *("eos_token_id", "id2label", "initializer_range", "is_encoder_decoder"),
        *("label2id", "max_position_embeddings", "model_type", "name_or_path"),
        *("_name_or_path", "output_attentions", "output_hidden_states", "pad_token_id"),
        *("pretraining_tp", "problem_type", "return_dict", "torch_dtype"),
        *("transformers_version", "use_cache"),
    )
)
_SIZES = {
    "num_hidden_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "intermediate_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "vocab_size": "--vocab-size",
    "rms_norm_eps": "--norm-epsilon",
    "num_local_experts": "--num-experts",
    "num_experts_per_tok": "--moe-router-topk",
    "router_aux_loss_coef": "--moe-aux-loss-coeff",
}
_EXPERTS = frozenset(
    (
        *("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"),
        *("router_jitter_noise", "output_router_logits"),
    )
)
_ATTENTION = frozenset(("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"))
_COMMON = frozenset(_SIZES) - _EXPERTS | {
    *("num_key_value_heads", "head_dim", "rope_theta", "rope_parameters", "rope_scaling"),
    *("attention_dropout", "attention_bias", "hidden_act", "tie_word_embeddings"),
}
# Fields of each family, and the flags that all of its models need.
_FAMILIES: Mapping[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "llama": (_COMMON | {"mlp_bias"}, ()),
    "mistral": (_COMMON | {"sliding_window"}, ()),
    "qwen2": (_COMMON | _ATTENTION | {"use_mrope"}, ("--add-qkv-bias",)),
    "qwen3": (_COMMON | _ATTENTION, ("--qk-layernorm",)),
    "mixtral": (_COMMON | _EXPERTS | {"sliding_window"}, ()),
    **dict.fromkeys((V2, V3), (_COMMON | FIELDS, ())),
}
_LATENT = (V2, V3)
_ALWAYS = (
    *("--swiglu", "--normalization RMSNorm", "--position-embedding-type rope"),
    "--disable-bias-linear",
)
# The value of a field that has a counterpart, or whether one has; and which do, in words.
_MUST_BE: Mapping[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "silu, which --swiglu computes"),
    "attention_bias": (False, "false: Megatron has one flag for all biases"),
    "mlp_bias": (False, "false: Megatron has one flag for all biases"),
    "use_sliding_window": (False, "false: attention sees the whole sequence"),
    "use_mrope": (False, "false: positions are those of text"),
    "layer_types": (
        lambda value: not value or set(value) == {"full_attention"},
        "full_attention for every layer",
    ),
    "router_jitter_noise": (0, "0: Megatron's noise is another"),
    "pretraining_tp": (1, "1"),
    "is_encoder_decoder": (False, "false: pretrain_gpt.py trains decoders"),
}
# What Megatron's --use-rope-scaling has built in.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("config", type=Path, metavar="FILE", help="a config.json")
    parser.add_argument("--json", action="store_true", help="the flags as a list, in JSON")


def run(args: Namespace) -> int:
    """Print the flags; returns the exit code."""
    text = read_text(args.config)
    try:
        found = parse_json(text)
        if not isinstance(found, dict):
            raise ValueError(f"holds a {type(found).__name__}; a configuration is an object")
        flags = megatron_flags(found)
    except json.JSONDecodeError as error:
        raise ValueError(f"{args.config}: not JSON: {error}; give a model's config.json") from None
    except ValueError as error:
        raise ValueError(f"{args.config}: {error}") from None
    write((json.dumps(flags) if args.json else shlex.join(flags)) + "\n")
    return OK


def megatron_flags(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the flags of a model with the same function, one word each.

    Args:
        config: as `transformers` writes it.

    Raises:
        ValueError: the family or a field is not known, or a value has no counterpart.
    """
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        found = f"model_type={family!r}" if family != "None" else "no model_type"
        raise ValueError(f"found {found}; it is one of {', '.join(sorted(_FAMILIES))}")
    fields, switches = _FAMILIES[family]
    if unknown := sorted(config.keys() - fields - _NO_MATTER):
        raise ValueError(
            f"unknown fields {', '.join(unknown)}: a {family} of Megatron's might differ by them; "
            "drop those that are not used"
        )
    needed, must_be = (*_SIZES,)[:5], dict(_MUST_BE)
    if family in _LATENT:
        needed += NEEDED
    if missing := [name for name in needed if config.get(name) is None]:
        raise ValueError(f"lacks {', '.join(missing)}")
    if family in _LATENT:
        must_be |= rules(config)
    if config.get("use_sliding_window", True):
        must_be["sliding_window"] = None, "null: attention sees the whole sequence"
    for name, (known, rule) in must_be.items():
        if (value := config.get(name)) is None:
            continue
        if not (known(value) if callable(known) else value == known):
            raise ValueError(f"found {name}={value!r}; it has to be {rule}")
    words = [*_ALWAYS, *switches, *_flags(config)]
    return tuple(word for flag in words for word in flag.split())


def _flags(config: Mapping[str, Any]) -> Iterator[str]:
    latent = config["model_type"] in _LATENT
    for name, flag in _SIZES.items():
        if config.get(name) is not None and not (latent and name in _EXPERTS):
            yield f"{flag} {config[name]}"
    # Megatron's defaults are others.
    yield f"--hidden-dropout 0 --attention-dropout {config.get('attention_dropout') or 0}"
    yield f"--max-position-embeddings {config.get('max_position_embeddings', 2048)}"
    if latent:
        yield from deepseek_flags(config)
    else:
        yield from _heads(config)
    if not config.get("tie_word_embeddings", False):
        yield "--untie-embeddings-and-output-weights"
    yield from _rotary(config, latent)


def _heads(config: Mapping[str, Any]) -> Iterator[str]:
    heads = config["num_attention_heads"]
    if (groups := config.get("num_key_value_heads") or heads) != heads:
        yield f"--group-query-attention --num-query-groups {groups}"
    if (size := config.get("head_dim") or config["hidden_size"] // heads) * heads != config[
        "hidden_size"
    ]:
        yield f"--kv-channels {size}"


def _rotary(config: Mapping[str, Any], latent: bool) -> Iterator[str]:
    """Yield the base of rotary embeddings, and how they are stretched."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = rope.pop("rope_theta", config.get("rope_theta") or 10_000)
    if base != int(base):
        raise ValueError(f"found rope_theta={base}; --rotary-base is a whole number")
    yield f"--rotary-base {int(base)}"
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if latent and (kind == "yarn" if rope else kind == "default"):
        yield from yarn_flags(rope)
        return
    if kind == "default" and not rope:
        return
    factor = rope.pop("factor", None)
    if kind != "llama3" or factor is None or rope != _LLAMA3:
        raise ValueError(
            f"found rope_type={kind!r} with {rope}; Megatron has default, and "
            + ("yarn" if latent else f"llama3 with {_LLAMA3}")
        )
    yield f"--use-rope-scaling --rope-scaling-factor {factor}"
