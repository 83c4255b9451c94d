import json
import shlex
from pathlib import Path

import pytest

from megatron.fold3d.commands.import_config import megatron_flags
from megatron.fold3d.commands.megatron_flags import described
from megatron.fold3d.predict.cost_model.presets import model_shape

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}

# As the file of DeepSeek-V3 has them.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "vocab_size": 129_280,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "seq_aux": True,
    "aux_loss_alpha": 1e-4,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10_000,
    "ep_size": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}


def test_a_configuration_becomes_flags_that_the_planner_reads(fold3d, tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    code, printed, _ = fold3d(f"import {file}")
    assert code == 0
    line = f"{printed.strip()} --seq-length 8192 --global-batch-size 128 --bf16"
    assert described(line.split()).model().num_parameters == 8_030_261_248


def test_megatron_parses_the_flags(parser):
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    flags = megatron_flags(LLAMA | {"rope_scaling": llama3, "head_dim": 64})
    args = parser.parse_args(flags)
    assert (args.num_query_groups, args.kv_channels, args.rotary_base) == (8, 64, 500_000)
    assert (args.layernorm_epsilon, args.use_rope_scaling, args.rope_scaling_factor) == (
        1e-5,
        True,
        8,
    )
    assert (args.swiglu, args.add_bias_linear, args.normalization) == (True, False, "RMSNorm")
    assert (args.hidden_dropout, args.attention_dropout) == (0, 0)


def test_megatron_parses_the_flags_of_latent_attention_and_of_experts_in_groups(parser):
    args = parser.parse_args(megatron_flags(DEEPSEEK_V3))
    assert (args.q_lora_rank, args.kv_lora_rank, args.qk_pos_emb_head_dim) == (1536, 512, 64)
    assert (args.rope_type, args.rotary_scaling_factor, args.mscale_all_dim) == ("yarn", 40, 1)
    assert args.moe_layer_freq == [0] * 3 + [1] * 58
    assert (args.moe_router_num_groups, args.moe_router_group_topk) == (8, 4)
    assert (args.moe_router_score_function, args.moe_router_topk_scaling_factor) == ("sigmoid", 2.5)
    assert (args.mtp_num_layers, args.moe_aux_loss_coeff) == (1, [1e-4])
    line = " ".join(megatron_flags(DEEPSEEK_V3 | {"num_nextn_predict_layers": 0}))
    read = described(f"{line} --seq-length 4096 --global-batch-size 128 --bf16".split())
    assert read.model().num_parameters == model_shape("deepseek-v3").num_parameters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_group": 4, "num_experts_per_tok": 4}, "found topk_group=4; it has to be num_experts"),
        ({"rms_norm_eps": 1e-5}, "found rms_norm_eps=1e-05; it has to be 1e-06"),
        ({"topk_method": "greedy"}, "found topk_method='greedy'; it has to be noaux_tc"),
        ({"num_key_value_heads": 8}, "found num_key_value_heads=8; it has to be num_attention"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "found rope_type='yarn' with"),
        ({"v_head_dim": None}, "lacks v_head_dim"),
        ({"model_type": "deepseek_v2"}, "found scoring_func='sigmoid'; it has to be softmax"),
        ({"index_topk": 2048}, "unknown fields index_topk: a deepseek_v3 of Megatron's"),
    ],
)
def test_a_deepseek_that_megatron_would_build_otherwise_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        megatron_flags(DEEPSEEK_V3 | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2"},
            "found model_type='gpt2'; it is one of deepseek_v2, deepseek_v3",
        ),
        ({"logit_scale": 2, "foo": 1}, "unknown fields foo, logit_scale: a llama of Megatron's"),
        ({"hidden_act": "gelu"}, "found hidden_act='gelu'; it has to be silu"),
        ({"attention_bias": True}, "found attention_bias=True; it has to be false"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "found rope_type='yarn'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "found sliding_window=4096; it has to"),
        ({"model_type": "qwen2", "use_mrope": True}, "found use_mrope=True; it has to be false"),
        ({"model_type": None}, "found no model_type; it is one of deepseek_v2, deepseek_v3"),
    ],
)
def test_what_megatron_would_build_otherwise_is_refused(fold3d, tmp_path: Path, change, message):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | change))
    code, printed, said = fold3d(f"import {shlex.quote(str(file))}")
    assert (code, printed) == (2, "")
    assert f"fold3d import: {file}: {message}" in said
    assert said.count("\n") == 1


def test_what_qwen_writes_and_does_not_use_is_no_obstacle():
    unused = {"use_mrope": False, "use_sliding_window": False, "sliding_window": 131_072}
    qwen = LLAMA | {"model_type": "qwen2"}
    assert megatron_flags(qwen | unused) == megatron_flags(qwen)


def test_a_file_that_is_no_json_is_named_once(fold3d, tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text("hello")
    assert f"{file}: not JSON: Expecting value" in fold3d(f"import {shlex.quote(str(file))}")[2]
    file.write_bytes(b"\xff")
    said = fold3d(f"import {shlex.quote(str(file))}")[2]
    assert said == f"fold3d import: {file}: not text in UTF-8\n"
