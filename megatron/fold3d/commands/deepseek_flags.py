"""What ``fold3d import`` knows of DeepSeek's models: latent attention, and experts in groups.

Megatron scores a group of experts by as many of its experts as a token takes of a group,
DeepSeek-V2 by the best one, DeepSeek-V3 by the two best. Numbers for which they differ are refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

V2, V3 = "deepseek_v2", "deepseek_v3"
SIZES = {
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
NEEDED = tuple(name for name in SIZES if name not in ("q_lora_rank", "aux_loss_alpha"))
FIELDS = frozenset(SIZES) | {
    *("first_k_dense_replace", "moe_layer_freq", "n_shared_experts", "n_group", "topk_group"),
    *("topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "seq_aux"),
    *("rope_interleave", "qk_head_dim", "mlp_bias", "output_router_logits"),
    *("num_nextn_predict_layers", "auto_map", "ep_size", "quantization_config"),
}
# What Megatron's yarn has built in where attention is latent.
_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}


def deepseek_flags(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags of attention, experts and routing; ``config`` keeps the `rules`."""
    yield "--multi-latent-attention --qk-layernorm"
    for name, flag in SIZES.items():
        if config.get(name) is not None:
            yield f"{flag} {config[name]}"
    num_dense = config.get("first_k_dense_replace") or 0
    if num_dense:
        yield f"--moe-layer-freq ([0]*{num_dense}+[1]*{config['num_hidden_layers'] - num_dense})"
    if num_shared := config.get("n_shared_experts"):
        width = num_shared * config["moe_intermediate_size"]
        yield f"--moe-shared-expert-intermediate-size {width}"
    if config.get("seq_aux"):
        yield "--moe-router-load-balancing-type seq_aux_loss"
    if config["model_type"] == V3:
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


def yarn_flags(rope: Mapping[str, Any]) -> Iterator[str]:
    """Yield how rotary positions are stretched, or that they are not.

    Args:
        rope: ``rope_parameters`` without ``rope_theta`` and the type, which is yarn; empty for
            plain rotary positions.

    Raises:
        ValueError: a value has no counterpart.
    """
    if not rope:
        yield "--rope-type rope"  # yarn is the default of latent attention
        return
    scales = {name: rope.get(name) for name in ("factor", "mscale", "mscale_all_dim")}
    rest = {name: value for name, value in rope.items() if name not in scales}
    if None in scales.values() or _YARN | rest != _YARN:
        raise ValueError(
            f"found rope_type='yarn' with {dict(rope)}; Megatron has yarn with factor, mscale, "
            f"mscale_all_dim and {_YARN}"
        )
    yield f"--rope-type yarn --rotary-scaling-factor {scales['factor']}"
    yield f"--mscale {scales['mscale']} --mscale-all-dim {scales['mscale_all_dim']}"


def rules(config: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    """Return, by field, the value that has a counterpart, or whether one has, and which do.

    Args:
        config: as `transformers` writes it, or DeepSeek, with all that are `NEEDED`.
    """
    is_v3 = config["model_type"] == V3
    best = 2 if is_v3 else 1  # experts by which the model scores a group
    heads, taken = config["num_attention_heads"], config["num_experts_per_tok"]
    score = "sigmoid" if is_v3 else "softmax"
    greedy = "group_limited_greedy" if _has_groups(config) else "greedy"
    method = "noaux_tc" if is_v3 else greedy
    norms = "1e-06: the norms of latent vectors have it, and Megatron has one for all"
    return {
        "num_key_value_heads": (
            heads,
            f"num_attention_heads, {heads}: every head has keys of its own",
        ),
        "rms_norm_eps": (1e-6, norms),
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
