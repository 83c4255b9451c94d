import json
import shlex
from pathlib import Path

import pytest

from megatron.fold3d.commands.import_config import megatron_flags
from megatron.fold3d.commands.megatron_flags import from_flags

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


def test_a_configuration_becomes_flags_that_the_planner_reads(fold3d, tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    code, printed, _ = fold3d(f"import {file}")
    assert code == 0
    line = f"{printed.strip()} --seq-length 8192 --global-batch-size 128 --bf16"
    # Llama 3 8B without its last norm, which the paper's formula leaves out.
    assert from_flags(line).shape.num_parameters == 8_030_261_248 - 4096


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "found model_type='gpt2'; it is one of llama, mistral, mixtral"),
        ({"logit_scale": 2, "foo": 1}, "unknown fields foo, logit_scale: a llama of Megatron's"),
        ({"hidden_act": "gelu"}, "found hidden_act='gelu'; it has to be silu"),
        ({"attention_bias": True}, "found attention_bias=True; it has to be false"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "found rope_type='yarn'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "found sliding_window=4096; it has to"),
    ],
)
def test_what_megatron_would_build_otherwise_is_refused(fold3d, tmp_path: Path, change, message):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | change))
    code, printed, said = fold3d(f"import {shlex.quote(str(file))}")
    assert (code, printed) == (2, "")
    assert f"fold3d import: {file}: {message}" in said
    assert said.count("\n") == 1
