"""A model that Megatron builds of imported flags computes what `transformers` computes."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.fold3d.commands.import_config import megatron_flags
from tests.distributed import run_distributed

pytestmark = pytest.mark.gloo

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
}
FAMILIES = {
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "deepseek_v2": {
        **LATENT,
        "first_k_dense_replace": 0,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 1,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        **LATENT,
        "rope_parameters": YARN,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "num_mtp_layers": 0,
    },
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "gpt_oss": {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}
REST = (
    "--device cpu --seq-length 16 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 "
    "--train-iters 1 --mock-data --tokenizer-type NullTokenizer --eval-interval 1"
)
# Both compute in fp32, and add up in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def test_models_of_imported_flags_have_the_logits_of_transformers() -> None:
    (differences,) = run_distributed(_largest_differences, 1)
    assert list(differences) == list(FAMILIES)
    assert {family: text for family, text in differences.items() if text} == {}


def _largest_differences() -> dict[str, str]:
    """Compare all families in one process: building one takes no time beside starting it."""
    return {family: _difference(family, number) for number, family in enumerate(FAMILIES)}


def _difference(family: str, number: int) -> str:
    import os
    import sys
    from contextlib import ExitStack

    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.global_vars import destroy_global_vars
    from megatron.training.initialize import initialize_megatron
    from megatron.training.models.gpt import GPTModelBuilder
    from transformers import AutoConfig, AutoModelForCausalLM

    from megatron.fold3d.training import launch

    torch.manual_seed(number)
    config = AutoConfig.for_model(family, **(TINY | FAMILIES[family]))
    theirs = AutoModelForCausalLM.from_config(config).eval()
    for name, tensor in theirs.state_dict().items():  # norms and biases are ones and zeros
        if name.endswith(("weight", "bias", "proj", "sinks")):
            torch.nn.init.normal_(tensor, std=0.2)
    tokens = torch.randint(0, TINY["vocab_size"], (1, 16))

    sys.argv = ["script", *megatron_flags(config.to_dict()), *REST.split()]
    with ExitStack() as patched:
        if (
            family == "gpt_oss"
        ):  # which no CPU trains: biases of experts, and masks that are on a GPU
            patched.enter_context(patch("fold3d_patches.cpu.flags.check"))
            mask_of = "megatron.core.fusions.fused_softmax.get_sliding_window_causal_mask"
            patched.enter_context(patch(mask_of, _outside_window))
        args = launch.prepare(sys.argv[1:], patched, "gpt")
        if number == 0:
            initialize_megatron(allow_no_cuda=True)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        ours = GPTModelBuilder(gpt_config_from_args(args)).build_model(
            groups, pre_process=True, post_process=True
        )
        ours.eval()
        state = _as_megatrons(theirs.state_dict(), config.to_dict())
        expected = {name for name in ours.state_dict() if not name.endswith("_extra_state")}
        assert state.keys() == expected, (state.keys() ^ expected, os.getpid())
        ours.load_state_dict(state, strict=False)
        mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
        with torch.no_grad():
            mine = ours(tokens, torch.arange(16)[None], mask)
            others = theirs(tokens).logits
    destroy_global_vars()
    destroy_num_microbatches_calculator()
    if torch.allclose(mine, others, **TOLERANCE):
        return ""
    return f"{(mine - others).abs().max()} of {others.abs().max()}"


def _outside_window(queries: int, keys: int, window: tuple[int, int]) -> torch.Tensor:
    """Megatron's mask, on a CPU."""
    seen = torch.ones(queries, keys, dtype=torch.bool)
    return ~seen.triu(keys - queries - window[0]).tril(keys - queries + window[1])


def _as_megatrons(state: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, Any]:
    """Name and arrange weights as Megatron's GPT does."""
    found = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    if not config["tie_word_embeddings"]:
        found["output_layer.weight"] = state["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        a, b = f"model.layers.{layer}", f"decoder.layers.{layer}"
        found[f"{b}.input_layernorm.weight"] = state[f"{a}.input_layernorm.weight"]
        found[f"{b}.pre_mlp_layernorm.weight"] = state[f"{a}.post_attention_layernorm.weight"]
        found[f"{b}.self_attention.linear_proj.weight"] = state[f"{a}.self_attn.o_proj.weight"]
        found |= _attention(state, f"{a}.self_attn", f"{b}.self_attention", config)
        if f"{a}.self_attn.sinks" in state:
            bias, sinks = state[f"{a}.self_attn.o_proj.bias"], state[f"{a}.self_attn.sinks"]
            found[f"{b}.self_attention.linear_proj.bias"] = bias
            found[f"{b}.self_attention.core_attention.softmax_offset"] = sinks
        found |= _gated(state, f"{a}.mlp", f"{b}.mlp")
        found |= _gated(state, f"{a}.mlp.shared_experts", f"{b}.mlp.shared_experts")
        if f"{a}.mlp.gate.weight" in state:
            found |= _experts(state, f"{a}.mlp", f"{b}.mlp")
        if f"{a}.mlp.router.weight" in state:
            found |= _experts_with_biases(state, f"{a}.mlp", f"{b}.mlp")
    return found


def _attention(
    state: dict[str, torch.Tensor], theirs: str, ours: str, config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    if "kv_lora_rank" in config:
        names = {
            "q_a_proj": "linear_q_down_proj",
            "q_a_layernorm": "q_layernorm",
            "q_b_proj": "linear_q_up_proj",
            "kv_a_proj_with_mqa": "linear_kv_down_proj",
            "kv_a_layernorm": "kv_layernorm",
            "kv_b_proj": "linear_kv_up_proj",
        }
        return {f"{ours}.{b}.weight": state[f"{theirs}.{a}.weight"] for a, b in names.items()}
    found = {}
    for kind in ("weight", "bias"):  # the heads of a group stand together
        if f"{theirs}.q_proj.{kind}" in state:
            parts = (
                state[f"{theirs}.{name}_proj.{kind}"].unflatten(
                    0, (config["num_key_value_heads"], -1)
                )
                for name in "qkv"
            )
            found[f"{ours}.linear_qkv.{kind}"] = torch.cat([*parts], dim=1).flatten(0, 1)
    for name in "qk":
        if f"{theirs}.{name}_norm.weight" in state:
            found[f"{ours}.{name}_layernorm.weight"] = state[f"{theirs}.{name}_norm.weight"]
    return found


def _gated(state: dict[str, torch.Tensor], theirs: str, ours: str) -> dict[str, torch.Tensor]:
    """The weights of a gated layer; none if there is no such layer."""
    if f"{theirs}.gate_proj.weight" not in state:
        return {}
    gate, up = (state[f"{theirs}.{name}_proj.weight"] for name in ("gate", "up"))
    return {
        f"{ours}.linear_fc1.weight": torch.cat([gate, up]),
        f"{ours}.linear_fc2.weight": state[f"{theirs}.down_proj.weight"],
    }


def _experts(state: dict[str, torch.Tensor], theirs: str, ours: str) -> dict[str, torch.Tensor]:
    found = {f"{ours}.router.weight": state[f"{theirs}.gate.weight"]}
    if f"{theirs}.gate.e_score_correction_bias" in state:
        found[f"{ours}.router.expert_bias"] = state[f"{theirs}.gate.e_score_correction_bias"]
    of_both = zip(
        state[f"{theirs}.experts.gate_up_proj"], state[f"{theirs}.experts.down_proj"], strict=True
    )
    for expert, (gate_and_up, down) in enumerate(of_both):
        of_expert = f"{ours}.experts.local_experts.{expert}"
        found[f"{of_expert}.linear_fc1.weight"] = gate_and_up
        found[f"{of_expert}.linear_fc2.weight"] = down
    return found


def _experts_with_biases(
    state: dict[str, torch.Tensor], theirs: str, ours: str
) -> dict[str, torch.Tensor]:
    """Those of gpt-oss, which lie transposed, each gate beside its input."""
    found = {f"{ours}.router.{k}": state[f"{theirs}.router.{k}"] for k in ("weight", "bias")}
    for expert in range(len(found[f"{ours}.router.bias"])):
        for name, linear in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
            of_expert = f"{ours}.experts.local_experts.{expert}.{linear}"
            weight = state[f"{theirs}.experts.{name}"][expert].T
            bias = state[f"{theirs}.experts.{name}_bias"][expert]
            if linear == "linear_fc1":
                weight, bias = (torch.cat([t[::2], t[1::2]]) for t in (weight, bias))
            found |= {f"{of_expert}.weight": weight, f"{of_expert}.bias": bias}
    return found
