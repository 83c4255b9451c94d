"""Models by name, as Megatron's flags, for ``--model-preset``.

`SHAPES` is the only table of models, so training builds what the planner predicts.
"""

from dataclasses import replace

from megatron.fold3d.predict.cost_model.model_shape import SHAPES, Family, ModelShape, model_shape

SCRIPTS: dict[Family, str] = {"gpt": "pretrain_gpt.py", "bert": "pretrain_bert.py"}
"""The script that trains each family; Megatron-core runs no encoder-decoder in a pipeline."""

_NAMES = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"),
    *("ffn_hidden_size", "kv_channels", "num_query_groups", "rotary_base", "num_experts"),
    *("moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    "moe_latent_size",
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
)
FIELDS = {name: name for name in _NAMES} | {
    "max_position_embeddings": "max_positions",
    "moe_router_topk": "experts_per_token",
    "moe_ffn_hidden_size": "expert_ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "shared_expert_ffn_hidden_size",
}
"""The sizes of a `ModelShape`, by the name of Megatron's argument."""

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

    The vocabulary's size is not among the flags, since the tokenizer decides it.
    """
    shape = replace(shape, max_positions=shape.max_positions or shape.seq_length)
    sizes = {f"--{name.replace('_', '-')}": getattr(shape, field) for name, field in FIELDS.items()}
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
        "--attention-output-gate": shape.output_gate,
        "--softmax-type learnable": shape.learned_sinks,
        "--moe-shared-expert-gate": shape.shared_expert_gate,
        f"--moe-layer-freq [0]*{dense}+[1]*{sparse}": dense,
    }
    given = {
        flag: size  # a zero width is passed on; other zeros stand for Megatron's default
        for flag, size in sizes.items()
        if size or (size is not None and flag.endswith("-ffn-hidden-size"))
    }
    return (
        *(word for flag, size in given.items() for word in (flag, str(size))),
        *(word for words, is_on in switches.items() if is_on for word in words.split()),
    )
