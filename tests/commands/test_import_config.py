import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.fold3d.commands.import_config import megatron_flags
from megatron.fold3d.commands.megatron_flags import described
from megatron.fold3d.predict.cost_model.presets import model_shape

CONFIGS = Path(__file__).parents[1] / "data" / "configs"  # as the makers' files have them
LLAMA, DEEPSEEK_V3, QWEN3_MOE, GPT_OSS = (
    json.loads((CONFIGS / f"{name}.json").read_text())
    for name in ("llama3", "deepseek_v3", "qwen3_moe", "gpt_oss")
)


def configuration(folder: Path, fields: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(fields))
    return file


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
        ({"topk_method": "greedy"}, "found topk_method='greedy'; it has to be noaux_tc"),
        ({"num_key_value_heads": 8}, "found num_key_value_heads=8; it has to be num_attention"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "found rope_type='yarn' with"),
        ({"v_head_dim": None}, "lacks v_head_dim"),
        ({"topk_group": None}, "lacks topk_group"),
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
        ({"model_type": "gpt2"}, "found model_type='gpt2'; it is one of deepseek_v2, deepseek_v3"),
        ({"logit_scale": 2, "foo": 1}, "unknown fields foo, logit_scale: a llama of Megatron's"),
        ({"hidden_act": "gelu"}, "found hidden_act='gelu'; it has to be silu"),
        ({"attention_bias": True}, "found attention_bias=True; it has to be false"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_attention_heads": 0}, "lacks num_attention_heads"),
        ({"num_hidden_layers": "32"}, "found num_hidden_layers='32'; it has to be a whole number"),
        ({"rope_scaling": True}, "found rope_scaling=True; it has to be an object"),
        ({"rms_norm_eps": -1}, "found rms_norm_eps=-1; it has to be a number that is not below"),
        ({"rope_theta": "1e4"}, "found rope_theta=1e4; --rotary-base is a whole number"),
        ({"is_llama_config": True, "rope_interleaved": False}, "unknown fields is_llama_config: a"),
        ({**GPT_OSS, "attention_bias": False}, "found attention_bias=False; it has to be true"),
        ({**GPT_OSS, "swiglu_alpha": 1}, "found swiglu_alpha=1; it has to be 1.702"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "found rope_type='yarn'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "found sliding_window=4096; it has to"),
        ({"model_type": "qwen2", "use_mrope": True}, "found use_mrope=True; it has to be false"),
        ({"model_type": None}, "found no model_type; it is one of deepseek_v2, deepseek_v3"),
    ],
)
def test_what_megatron_would_build_otherwise_is_refused(fold3d, tmp_path: Path, change, message):
    file = configuration(tmp_path, LLAMA | change)
    said = fold3d.refusal(f"import {shlex.quote(str(file))}")
    assert f"fold3d import: {file}: {message}" in said


def test_what_qwen_writes_and_does_not_use_is_no_obstacle():
    unused = {"use_mrope": False, "use_sliding_window": False, "sliding_window": 131_072}
    qwen = LLAMA | {"model_type": "qwen2"}
    assert megatron_flags(qwen | unused) == megatron_flags(qwen)


def test_what_is_switched_off_is_taken_and_named(fold3d, tmp_path: Path):
    unused = {"is_llama_config": False, "rope_interleaved": None}
    file = configuration(tmp_path, LLAMA | unused)
    code, printed, said = fold3d(f"import {file}")
    assert (code, printed.split()) == (0, [*megatron_flags(LLAMA)])
    assert (
        said
        == "taken as unused, since they are false or empty: is_llama_config, rope_interleaved\n"
    )


def test_the_epsilon_of_deepseek_is_a_flag_and_where_it_differs_is_said(fold3d, tmp_path: Path):
    file = configuration(tmp_path, DEEPSEEK_V3 | {"rms_norm_eps": 1e-5})
    code, printed, said = fold3d(f"import {file}")
    assert (code, "--norm-epsilon 1e-05" in printed) == (0, True)
    assert said.startswith("rms_norm_eps=1e-05 is that of latent vectors too, where transformers")


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA, 8_030_261_248),
        (QWEN3_MOE, 30_532_122_624),
        pytest.param(LLAMA | GPT_OSS, 20_914_757_184, marks=pytest.mark.newest_options),
    ],
)
def test_families_have_the_parameters_that_their_makers_say(parser, config, parameters: int):
    flags = megatron_flags(config)
    parser.parse_args(flags)
    read = described(f"{' '.join(flags)} --seq-length 4096 --global-batch-size 8".split())
    assert read.model().num_parameters == parameters


def test_layers_without_experts_and_windows_are_patterns():
    dense = megatron_flags(QWEN3_MOE | {"mlp_only_layers": [0], "num_hidden_layers": 3})
    assert "--moe-layer-freq [0,1,1]" in " ".join(dense)
    windows = ["full_attention", "sliding_attention"]
    flags = " ".join(megatron_flags(GPT_OSS | {"num_hidden_layers": 2, "layer_types": windows}))
    assert "--window-size 127,0 --window-attn-skip-freq [0,1]" in flags


def test_a_file_that_is_no_json_is_named_once(fold3d, tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text("hello")
    line = f"import {shlex.quote(str(file))}"
    assert f"{file}: not JSON: Expecting value" in fold3d.refusal(line)
    file.write_bytes(b"\xff")
    assert fold3d.refusal(line) == f"fold3d import: {file}: not text in UTF-8\n"
