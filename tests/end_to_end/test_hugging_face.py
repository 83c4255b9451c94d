"""A model that Megatron builds of imported flags computes what `transformers` computes."""

import re
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
        if family == "gpt_oss":  # no CPU trains it: biases of experts, and masks on a GPU
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
        assert state.keys() == expected, state.keys() ^ expected
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


# Parts of names for which Megatron has others.
NAMES = {
    "model.embed_tokens": "embedding.word_embeddings",
    "model.layers": "decoder.layers",
    "model.norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "self_attn": "self_attention",
    "o_proj": "linear_proj",
    "sinks": "core_attention.softmax_offset",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "down_proj": "linear_fc2",
    "gate": "router",
    "e_score_correction_bias": "expert_bias",
}
_PART = re.compile(rf"\b({'|'.join(NAMES)})\b")


def _as_megatrons(state: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, Any]:
    """Name and arrange weights as Megatron's GPT does."""
    found = {_PART.sub(lambda part: NAMES[part[0]], name): value for name, value in state.items()}
    if config["tie_word_embeddings"]:
        del found["output_layer.weight"]
    for name in [*found]:
        if ".experts." in name:
            are_transposed = config["model_type"] == "gpt_oss"
            found |= _experts(name, found.pop(name), are_transposed=are_transposed)
        elif "q_proj" in name:  # the heads of a group stand together
            parts = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            groups = [part.unflatten(0, (config["num_key_value_heads"], -1)) for part in parts]
            whole = torch.cat(groups, dim=1).flatten(0, 1)
            found[name.replace("q_proj", "linear_qkv")] = whole
        elif "gate_proj" in name:
            both = found.pop(name), found.pop(name.replace("gate_proj", "up_proj"))
            found[name.replace("gate_proj", "linear_fc1")] = torch.cat(both)
    return found


def _experts(name: str, weights: torch.Tensor, *, are_transposed: bool) -> dict[str, torch.Tensor]:
    """The weights or biases of all experts, those of gpt-oss with each gate beside its input."""
    layer, _, part = name.partition(".experts.")
    linear = "linear_fc1" if part.startswith("gate_up") else "linear_fc2"
    kind = "bias" if part.endswith("bias") else "weight"
    found = {}
    for expert, own in enumerate(weights):
        if are_transposed:
            own = own.t()
            own = torch.cat([own[::2], own[1::2]]) if linear == "linear_fc1" else own
        found[f"{layer}.experts.local_experts.{expert}.{linear}.{kind}"] = own
    return found
