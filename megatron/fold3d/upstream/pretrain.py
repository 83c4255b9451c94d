"""What differs in flags, models, batches and training itself; see `upstream.versions`."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

from megatron.fold3d.upstream.versions import is_before

# Flags that we read and an older parser lacks, with what validation leaves where none is given.
_LATER_FLAGS: Mapping[str, Any] = {
    # Until 0.18.
    "eval_global_batch_size": None,
    "eval_micro_batch_size": None,
    "save_params_interval": None,
    "step_batch_size_schedule": None,
    # Until 0.19.
    "dataloader_inter_document_masking": False,
    "expert_tensor_parallel_num_weight_shards": None,
    "logits_load_dir": None,
    "logits_save_dir": None,
    "tensor_parallel_num_weight_shards": None,
}


def tried(megatron: str, torch: str) -> str:
    """Return how the tests ended with two versions as ``0.19.2``; empty if nobody tried them."""
    rows = json.loads(Path(__file__).with_name("tried.json").read_text(encoding="utf-8"))
    found = [row for row in rows if (row["megatron-core"], row["torch"]) == (megatron, torch)]
    return "".join(f"on {row['date']}: {row['result']}" for row in found)


def add_later_flags(parser: ArgumentParser) -> None:
    """Give a parser of Megatron's the defaults of flags that only later versions have."""
    lacking = _LATER_FLAGS.keys() - {action.dest for action in parser._actions}
    parser.set_defaults(**{name: _LATER_FLAGS[name] for name in lacking})


def parse_and_validate_args(
    add_arguments: Callable[[ArgumentParser], ArgumentParser],
    ignore_unknown_args: bool,
    args_defaults: Mapping[str, Any],
) -> Namespace:
    """Parse and validate ``sys.argv``, and set Megatron's global variables. Until 0.18."""
    from megatron.training import arguments

    if not is_before("0.18"):
        args: Namespace = arguments.parse_and_validate_args(
            add_arguments, ignore_unknown_args, args_defaults=args_defaults
        )
        return args

    from megatron.training.checkpointing import load_args_from_checkpoint
    from megatron.training.global_vars import set_global_variables

    args = arguments.parse_args(add_arguments, ignore_unknown_args)
    if args.use_checkpoint_args or args_defaults.get("use_checkpoint_args"):
        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
    arguments.validate_args(args, args_defaults)
    set_global_variables(args)
    return args


def pretraining(
    args: Namespace, model: Any, datasets: Callable[..., Any], forward_step: Callable[..., Any]
) -> Callable[[], None]:
    """Return what trains a model of `gpt_config_from_args`, once Megatron has checked its flags.

    Until 0.19; before 0.18 with less to hand over and to check.
    """
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils
    from megatron.training import pretrain as upstream

    kind = ModelType.encoder_or_decoder
    if not is_before("0.19"):
        container = argument_utils.pretrain_cfg_container_from_args(args, model)
        return partial(upstream, container, datasets, kind, forward_step)

    def provide(
        pre_process: bool, post_process: bool, vp_stage: int | None = None, **options: Any
    ) -> Any:
        builder = resolve_name(model.builder)(model)
        return builder.build_model(options["pg_collection"], pre_process, post_process, vp_stage)

    containers: tuple[Any, ...] = ()
    if not is_before("0.18"):
        containers = (argument_utils.pretrain_cfg_container_from_args(args, model),)
    return partial(upstream, *containers, datasets, provide, kind, forward_step)


def tokenizer_config(**fields: Any) -> Any:
    """Return what ``build_tokenizer`` reads; it reads Megatron's flags until 0.18."""
    if not is_before("0.18"):
        from megatron.training.config import TokenizerConfig

        return TokenizerConfig(**fields)

    unpadded = {"padded_vocab_size": 0}  # known, so not computed
    return Namespace(**vars(default_flags()) | fields | unpadded)


def null_vocab_size(num_tokens: int) -> int:
    """Return a null tokenizer's ``--vocab-size``. Until 0.18 the last token comes on top of it."""
    return num_tokens - 1 if is_before("0.18") else num_tokens


def default_flags() -> Namespace:
    """Return the namespace of Megatron's flags if none is given."""
    from megatron.training.arguments import add_megatron_arguments

    parser: ArgumentParser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    return parser.parse_args([])


def get_batch_on_this_tp_rank(batch: dict[str, Any], **where: Any) -> dict[str, Any]:
    """Return a batch of whole sequences that the first tensor-parallel rank has read. Until 0.19.

    Args:
        batch: ``[batch, seq]`` on the device; empty on other ranks.
        where: Megatron's own parameters, but for those of sequences of several lengths.
    """
    if not is_before("0.19"):
        from megatron.core import utils

        given = {"has_cu_seqlens": False, "is_hybrid_cp": False, **where}
        return dict(utils.get_batch_on_this_tp_rank(batch, **given))

    import torch

    size, length = where["micro_batch_size"], where["seq_length"]
    whole = torch.int64, (size, length)
    kinds: dict[str, tuple[Any, tuple[int, ...]]] = {
        "tokens": whole,
        "labels": whole,
        "position_ids": whole,
        "loss_mask": (torch.float32, (size, length)),
    }
    if where["create_attention_mask_in_dataloader"]:
        kinds["attention_mask"] = torch.bool, (size, 1, length, length)
    if where["tp_rank"]:
        device = torch.cuda.current_device()
        batch = {name: torch.empty(s, dtype=t, device=device) for name, (t, s) in kinds.items()}
    for name in kinds:
        torch.distributed.broadcast(
            batch[name], where["broadcast_src_rank"], group=where["broadcast_group"]
        )
    return batch


def get_batch_on_this_cp_rank(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
    """Return this context-parallel rank's part of a batch of whole sequences. Until 0.18."""
    from megatron.core import utils

    options = {} if is_before("0.18") else {"is_hybrid_cp": False}
    return dict(utils.get_batch_on_this_cp_rank(batch, cp_group=cp_group, **options))


def mtp_on_this_rank(layout: Any, mtp_num_layers: int | None, vp_stage: int | None) -> bool:
    """Return True if this virtual stage has layers of multi-token prediction. Until 0.18."""
    from megatron.core.transformer import multi_token_prediction as upstream

    of_model = {"pipeline_model_parallel_layout": layout, "mtp_num_layers": mtp_num_layers}
    model = (SimpleNamespace(**of_model),) if is_before("0.18") else (layout, mtp_num_layers)
    return bool(upstream.mtp_on_this_rank(*model, ignore_virtual=False, vp_stage=vp_stage))


def gpt_config_from_args(args: Namespace, **kind: type) -> Any:
    """Return what a GPT is built from, or a ``model_config_cls`` of the same flags. Until 0.19."""
    if not is_before("0.19"):
        from megatron.training import argument_utils

        return argument_utils.gpt_config_from_args(args, **kind)

    from megatron.training.arguments import core_transformer_config_from_args

    transformer = core_transformer_config_from_args(args)
    if is_before("0.18") and args.schedule == "stock":
        # Stock's interleaved order frees outputs that are still being sent, and others get garbage
        # (https://github.com/NVIDIA/Megatron-LM/issues/4047).
        transformer.deallocate_pipeline_outputs = False
    return kind.get("model_config_cls", _GPTModelConfig)(
        transformer=transformer,
        spec=args.spec,
        vocab_size=args.padded_vocab_size,
        should_pad_vocab=False,
        seq_length=args.max_position_embeddings,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    )


def __getattr__(name: str) -> Any:
    """Return ``GPTModelConfig`` or ``GPTModelBuilder``, which are ours until 0.19."""
    if name not in ("GPTModelConfig", "GPTModelBuilder"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if is_before("0.19"):
        return globals()[f"_{name}"]
    from megatron.training.models import gpt

    return getattr(gpt, name)


class _GPTModelConfig(SimpleNamespace):
    """What Megatron's ``GPTModel`` takes, and the options of its layers. Until 0.19."""

    builder = f"{__name__}._GPTModelBuilder"
    transformer: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["transformer"], name)


class _GPTModelBuilder:
    """Builds one model chunk, as `GPTModelBuilder` of 0.19. Until 0.19."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config

    def build_model(
        self,
        pg_collection: Any,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None = None,
    ) -> Any:
        """Return the chunk of a virtual stage, with embedding and head where they are asked for."""
        from megatron.core.models.gpt import GPTModel

        options = vars(self._model_config).copy()
        config, spec = options.pop("transformer"), options.pop("spec")
        del options["should_pad_vocab"]
        layers, prediction = _layers(config, spec, vp_stage)
        return GPTModel(
            config=config,
            transformer_layer_spec=layers,
            mtp_block_spec=prediction,
            max_sequence_length=options.pop("seq_length"),
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **options,
        )


def _layers(config: Any, spec: Any, vp_stage: int | None) -> tuple[Any, Any]:
    """Return the specification of a chunk's layers, and that of multi-token prediction or None."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.heterogeneous import heterogeneous_layer_specs
    from megatron.core.transformer import spec_utils
    from megatron.core.transformer.heterogeneous import heterogeneous_config

    engine = config.transformer_impl == "transformer_engine"
    norms = {"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm}
    if spec is not None:
        layers = spec_utils.import_module(spec)
    elif config.experimental_attention_variant is not None:
        layers = variants.get_transformer_block_with_experimental_attention_variant_spec(
            config, vp_stage=vp_stage
        )
    elif isinstance(config, heterogeneous_config.HeterogeneousTransformerConfig):
        layers = heterogeneous_layer_specs.get_gpt_heterogeneous_layer_spec(config, engine)
    else:
        layers = specs.get_gpt_decoder_block_spec(config, engine, **norms, vp_stage=vp_stage)
    if config.mtp_num_layers is None:
        return layers, None
    last = specs.get_gpt_decoder_layer_specs(config, engine, **norms)[-1]
    return layers, specs.get_gpt_mtp_block_spec(config, last, engine, vp_stage=vp_stage)
