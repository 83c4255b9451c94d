"""What a newer Megatron draws, or leaves to scripts, is looked at before a user meets it.

Nobody reads 300 files anew for each version: the tests search the source of the installed one.
"""

import ast
import inspect
import re
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import megatron.training
import pytest

from megatron.fold3d.config.settings import DRAWS
from megatron.fold3d.training import bert, gpt, pretraining

pytestmark = pytest.mark.slow
ROOT = Path(megatron.training.__file__).parents[1]
# Of torch's, numpy's and Python's generators, by the last part of their names.
_GENERATORS = re.compile(
    r"(rand|randn|randint|normal|uniform|bernoulli|dropout|multinomial|poisson)(_like|_)?|randperm|"
    r"(random|exponential|geometric|log_normal|cauchy)_|(xavier|kaiming|trunc)_(normal|uniform)_|"
    r"(alpha|feature|feature_alpha|native)_dropout|(Alpha)?Dropout[123]?d?|gumbel_softmax|Gumbel|"
    r"Uniform|Normal|Bernoulli|Categorical|rsample|sample|shuffle|permutation|choices?|Random|"
    r"RandomState|default_rng|fork"
)
_OTHER_PROGRAMS = (  # inference, data, other models and what docs/compatibility.md refuses
    *("core/inference", "core/export", "core/post_training", "core/distributed/fsdp"),
    *("core/datasets", "training/datasets"),
    *(f"core/models/{m}" for m in ("T5", "audio", "huggingface", "mimo", "multimodal", "vision")),
)
_WEIGHTS = "initial weights"
_FAULTS = "faults, from a generator of their own"
_SWITCH = "it only switches generators: what draws inside has its own line"
_ROUTING = "--num-experts and --moe-"
# Where Megatron 0.19.2 draws: the setting of `DRAWS` that says so, or why no forward does.
REVIEWED = {
    "core/fault_injector.py:get_fault": _FAULTS,
    "core/fault_injector.py:get_fault_ranks": _FAULTS,
    "core/fault_injector.py:setup_fault_injection": _FAULTS,
    "core/fusions/fused_bias_dropout.py:_bias_dropout_add_func": "--hidden-dropout",
    "core/models/common/embeddings/language_model_embedding.py:LanguageModelEmbedding.__init__": (
        "--hidden-dropout"
    ),
    "core/models/common/embeddings/language_model_embedding.py:LanguageModelEmbedding.forward": (
        _SWITCH
    ),
    "core/models/common/fine_grained_callables.py:build_mtp_layer_callables."
    "rng_context_wrapper": _SWITCH,
    "core/models/common/fine_grained_callables.py:build_mtp_layer_callables."
    "submodule_mtp_pre_dispatch_forward": _SWITCH,
    "core/optimizer/cpu_offloading/hybrid_optimizer.py:HybridDeviceOptimizer.dummy_step": (
        "gradients of a first step that is taken back"
    ),
    "core/rerun_state_machine.py:RerunErrorInjector.maybe_inject": (
        "faults, once a loss: the order of micro-batches"
    ),
    "core/ssm/gated_delta_net/common.py:_GDNBase.reset_parameters": _WEIGHTS,
    "core/ssm/mamba_mixer.py:MambaMixer.__init__": _WEIGHTS,
    "core/tensor_parallel/layers.py:_initialize_affine_weight_gpu": _WEIGHTS,
    "core/transformer/cuda_graphs.py:TECudaGraphHelper.create_cudagraphs": "graphs are refused",
    "core/transformer/dot_product_attention.py:DotProductAttention.__init__": "--attention-dropout",
    "core/transformer/dot_product_attention.py:DotProductAttention.forward": _SWITCH,
    "core/transformer/moe/moe_utils.py:RandomSTE.forward": f"{_ROUTING}router-force-load-balancing",
    "core/transformer/moe/moe_utils.py:RandomSTEShared.forward": f"{_ROUTING}router-force-biased",
    "core/transformer/moe/router.py:TopKRouter.apply_input_jitter": f"{_ROUTING}input-jitter-eps",
    "core/transformer/multi_token_prediction.py:MultiTokenPredictionLayer."
    "_proj_and_transformer_layer": _SWITCH,
    "core/transformer/transformer_block.py:TransformerBlock.forward": _SWITCH,
    "core/utils.py:init_method_normal": _WEIGHTS,
    "core/utils.py:mup_scaled_init_method_normal": _WEIGHTS,
    "core/utils.py:scaled_init_method_normal": _WEIGHTS,
    "training/argument_utils.py:core_transformer_config_from_args": _WEIGHTS,
    "training/ft_integration.py:maybe_setup_simulated_fault": _FAULTS,
    "training/gpu_sniff_test.py:bench_all_reduce": "before training",
    "training/gpu_sniff_test.py:bench_all_to_all": "before training",
    "training/gpu_sniff_test.py:bench_gemms": "before training",
    "training/gpu_sniff_test.py:bench_reduce_scatter": "before training",
    "training/gpu_sniff_test.py:bench_sendrecv": "before training",
    "training/initialize.py:_warmup_jit_function": "before training",
    "training/yaml_arguments.py:core_transformer_config_from_yaml": _WEIGHTS,
}


def test_what_draws_random_numbers_is_known() -> None:
    found = {
        f"{name}:{function}"
        for name, text in sources().items()
        if not name.startswith(_OTHER_PROGRAMS) and any(map(_GENERATORS.fullmatch, names(text)))
        for function, node in inside(text)
        if isinstance(node, ast.Attribute) and _GENERATORS.fullmatch(node.attr)
    }
    assert found - REVIEWED.keys() == set(), "if a forward draws there, settings.DRAWS names a flag"
    assert REVIEWED.keys() - found == set(), "gone"
    assert {why for why in REVIEWED.values() if why.startswith("--")} == set(DRAWS)


# Attributes of the namespace that Megatron's own scripts of 0.19.0 read; the wheel lacks these.
STOCKS = {
    # pretrain_gpt.py, with gpt_builders.py and model_provider.py
    gpt: """allow_ambiguous_pad_tokens check_for_nan_in_loss_and_grad check_for_spiky_loss
    context_parallel_size create_attention_mask_in_dataloader data_cache_path data_parallel_size
    dataloader_defer_npy_index_mmap dataloader_fast_cache_load dataloader_inter_document_masking
    eod_mask_loss experimental_attention_variant fim_data fim_eod_token fim_fragment_rate
    fim_middle_token fim_no_prefix fim_pad_token fim_prefix_token fim_rate fim_split_sample
    fim_spm_rate fim_suffix_token fp16_lm_cross_entropy full_validation
    heterogeneous_layers_config_path hybrid_context_parallel logits_load_decode_threads
    logits_load_dir logits_load_ignore_errors logits_load_kd_loss_alpha
    logits_load_msc_prefetch_depth logits_load_prefetch_factor max_position_embeddings
    memory_snapshot_path micro_batch_size mid_level_dataset_surplus mmap_bin_files mock_data
    modelopt_enabled mtp_num_layers multiple_validation_sets normalization
    num_dataset_builder_threads num_experts object_storage_cache_path
    overlap_moe_expert_parallel_comm padded_vocab_size per_dataset_sequences_path
    pipeline_model_parallel_size position_embedding_type qk_l2_norm record_memory_history
    reset_attention_mask reset_position_ids rotary_base rotary_percent seed seq_length
    sequence_parallel sft spec split tensor_model_parallel_size transformer_impl
    untie_embeddings_and_output_weights use_rope_scaling yaml_cfg""",
    # examples/bert/pretrain_bert.py
    bert: """allow_ambiguous_pad_tokens bert_binary_head data_cache_path data_path mask_prob
    max_position_embeddings mid_level_dataset_surplus padded_vocab_size seed seq_length
    short_seq_prob spec split test_data_path train_data_path untie_embeddings_and_output_weights
    valid_data_path""",
}
# What builds the model from the namespace, where ours calls Megatron as its scripts do.
_BUILDERS = ("argument_utils.py", "models/gpt.py", "utils/utils.py")
_SETTLED = {
    "modelopt_enabled": "no flag of Megatron's parser sets it",
    "overlap_moe_expert_parallel_comm": "asserted where stock's schedule asks for its steps",
    **dict.fromkeys(
        ("data_path", "train_data_path", "valid_data_path", "test_data_path"),
        "by get_blend_and_blend_per_split",
    ),
}
_PARSER = "training/arguments.py"  # it also writes them, and has their names in quotes
_READ = re.compile(r"\bargs\.(\w+)(?!\w|\s*=[^=])")
_NAME = re.compile(r"\.(\w+)\b|[\"'](\w+)[\"']")
_OF_OTHERS = ("biencoder", "vision", "rl", "inference", "In-process restart")
_BY_NOBODY = {  # in 0.19.2; "--muon-" by the optimizer, which takes what begins so
    *("apply_residual_connection_post_layernorm", "deprecated_use_mcore_models", "onnx_safe"),
    *("dist_ckpt_save_pre_mcore_014", "enable_full_sharding_in_hsdp", "openai_gelu"),
    *("exit_signal_handler_for_dataloader", "rampup_batch_size", "use_flash_attn"),
    "vocab_extra_ids",
}


@pytest.mark.parametrize("script", STOCKS, ids=lambda script: script.__name__.rpartition(".")[2])
def test_what_stocks_script_reads_ours_reads_or_refuses(script) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    by_field = (TransformerConfig, gpt.GPTDatasetConfig, bert.BERTMaskedWordPieceDatasetConfig)
    read = {field.name for kind in by_field for field in fields(kind)} | of_scripts(script)
    read |= {name for file in _BUILDERS for name in names(sources()[f"training/{file}"])}
    unread = set(STOCKS[script].split()) - read - _SETTLED.keys()
    assert {name for name in unread if not belongs_to_a_refused(name)} == set()


def test_an_option_that_megatron_leaves_to_scripts_is_read_or_refused(
    parser: ArgumentParser,
) -> None:
    of_megatron = {
        name
        for file, text in sources().items()
        for name in (set(_READ.findall(text)) if file == _PARSER else names(text))
    }
    left = {
        action.dest
        for group in parser._action_groups
        if group.title not in (*_OF_OTHERS, "FOLD3D")
        for action in group._group_actions
        if action.dest not in of_megatron | of_scripts(gpt, bert) | _BY_NOBODY | {"help"}
    }
    assert {n for n in left if not (n.startswith("muon_") or belongs_to_a_refused(n))} == set()


def test_forward_steps_take_what_megatrons_schedules_give() -> None:
    given = {
        keyword.arg
        for name, text in sources().items()
        if name.startswith("core/pipeline_parallel")
        for _, node in inside(text)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "forward_step_func"
        for keyword in node.keywords
    }
    assert given
    assert given <= inspect.signature(gpt.forward_step).parameters.keys()


@cache
def sources() -> dict[str, str]:
    """Return the text of each file of Megatron's."""
    files = (file for part in ("core", "training") for file in (ROOT / part).rglob("*.py"))
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


def inside(text: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield each node of a source with the names of the classes and functions that hold it."""
    left: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    while left:
        function, node = left.pop()
        yield function, node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".removeprefix(".")
        left += ((function, child) for child in ast.iter_child_nodes(node))


def names(text: str) -> set[str]:
    """Return the attributes in a source, and its words in quotes, which `getattr` may be given."""
    return {attribute or word for attribute, word in _NAME.findall(text)}


def of_scripts(*scripts) -> set[str]:
    modules = (pretraining, *scripts)
    return {name for module in modules for name in names(inspect.getsource(module))}


def belongs_to_a_refused(name: str) -> bool:
    """Tell whether an option says more about one that ours refuses."""
    refused = {*gpt.NOT_PLAIN_GPT} & {*bert.NOT_BERT}
    return any(name.startswith(other.rpartition("_")[0] + "_") for other in refused)
