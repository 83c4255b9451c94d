"""Models by name, as Megatron's flags: what ``--model-preset`` stands for.

`SHAPES` is the only table of models, so training builds what the planner predicts.
"""

from megatron.fold3d.predict.cost_model.model_shape import SHAPES, Family, ModelShape, model_shape

SCRIPTS: dict[Family, str] = {"gpt": "pretrain_gpt.py", "bert": "pretrain_bert.py"}
"""Which script trains which models; Megatron-core runs no encoder-decoder in a pipeline."""

AS_GPT = ("cpm",)
"""Encoder-decoders whose preset is a GPT of the same depth, width and vocabulary."""


def preset_flags(name: str, family: Family) -> tuple[str, ...]:
    """Return the flags that ``--model-preset name`` stands for in the script of ``family``.

    Raises:
        ValueError: there is no such model, or another script trains it.
    """
    shape = model_shape(name)
    if name not in SHAPES or shape in _presets(family):
        return shape_flags(shape)
    reason = "Megatron-core runs no encoder-decoder in a pipeline"
    if script := SCRIPTS.get(shape.family):
        reason = f"{script} trains it"
    ours = ", ".join(shape.name for shape in _presets(family))
    raise ValueError(
        f"--model-preset {name}: {reason}; {SCRIPTS[family]} trains {ours}, "
        "and any layers-hidden-heads such as 24-2048-16"
    )


def _presets(family: Family) -> tuple[ModelShape, ...]:
    as_gpt = AS_GPT if family == "gpt" else ()
    return tuple(s for s in SHAPES.values() if s.family == family or s.name in as_gpt)


def shape_flags(shape: ModelShape) -> tuple[str, ...]:
    """Return the flags that make Megatron build a model of this shape.

    Its vocabulary is not among them: that comes with the tokenizer.
    """
    sizes = {
        "num-layers": shape.num_layers,
        "hidden-size": shape.hidden_size,
        "num-attention-heads": shape.num_attention_heads,
        "seq-length": shape.seq_length,
        "max-position-embeddings": shape.max_positions or shape.seq_length,
        "ffn-hidden-size": shape.ffn_hidden_size,
        "kv-channels": shape.kv_channels,
        "num-query-groups": shape.num_query_groups,
        "rotary-base": shape.rotary_base,
        "num-experts": shape.num_experts,
        "moe-router-topk": shape.experts_per_token,
        "moe-ffn-hidden-size": shape.expert_ffn_hidden_size,
        "moe-shared-expert-intermediate-size": shape.shared_expert_ffn_hidden_size,
        "q-lora-rank": shape.q_lora_rank,
        "kv-lora-rank": shape.kv_lora_rank,
        "qk-head-dim": shape.qk_head_dim,
        "qk-pos-emb-head-dim": shape.qk_pos_emb_head_dim,
        "v-head-dim": shape.v_head_dim,
    }
    dense, sparse = shape.num_dense_layers, shape.num_layers - shape.num_dense_layers
    switches = {
        "--group-query-attention": shape.num_query_groups,
        "--position-embedding-type rope": shape.rotary_base,
        "--multi-latent-attention": shape.is_latent,
        "--qk-layernorm": shape.qk_norm,
        "--swiglu": shape.swiglu,
        "--normalization RMSNorm": shape.rms_norm,
        "--disable-bias-linear": not shape.biases,
        "--add-qkv-bias": shape.qkv_bias,
        "--untie-embeddings-and-output-weights": shape.untied,
        f"--moe-layer-freq [0]*{dense}+[1]*{sparse}": dense,
    }
    return (
        *(word for name, size in sizes.items() if size for word in (f"--{name}", str(size))),
        *(word for words, is_on in switches.items() if is_on for word in words.split()),
    )
