"""Megatron-core's BERT, in the form that ``megatron.training`` builds its own models from.

The wheel has the model, but a builder only for GPT. A BERT has the same flags and the same
configuration as a GPT; only its builder differs.
"""

from typing import Any, ClassVar

from megatron.core.models.bert.bert_layer_specs import (
    bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.training import get_args

from megatron.fold3d.upstream.pretrain import GPTModelBuilder, GPTModelConfig

NUM_TOKEN_TYPES = 2  # for the first and the second segment of text


class BertModelConfig(GPTModelConfig):  # type: ignore[misc]  # Megatron has no types
    """The options of a BERT: those of a GPT, for another builder."""

    builder: ClassVar[str] = "megatron.fold3d.training.bert_model.BertModelBuilder"


class BertModelBuilder(GPTModelBuilder):  # type: ignore[misc]
    """Builds one model chunk; what wraps and distributes chunks is Megatron's."""

    def build_model(
        self,
        pg_collection: Any,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> BertModel:
        """Return the chunk of a virtual stage, with the embedding and the heads where they go."""
        options = self._model_config
        vocab_size = options.vocab_size
        if options.should_pad_vocab:
            from megatron.training.vocab_utils import calculate_padded_vocab_size

            vocab_size = calculate_padded_vocab_size(
                vocab_size, options.make_vocab_size_divisible_by, options.tensor_model_parallel_size
            )
        virtual = {"vp_stage": vp_stage, "vp_size": options.virtual_pipeline_model_parallel_size}
        if pre_process is None:
            pre_process = is_vp_first_stage(**virtual) and is_pp_first_stage(pg_collection.pp)
        if post_process is None:
            post_process = is_vp_last_stage(**virtual) and is_pp_last_stage(pg_collection.pp)
        has_binary_head = get_args().bert_binary_head
        return BertModel(
            config=options.transformer,
            num_tokentypes=NUM_TOKEN_TYPES if has_binary_head else 0,
            transformer_layer_spec=_layer(options.transformer_impl),
            vocab_size=vocab_size,
            max_sequence_length=options.seq_length,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=options.fp16_lm_cross_entropy,
            parallel_output=options.parallel_output,
            share_embeddings_and_output_weights=options.share_embeddings_and_output_weights,
            position_embedding_type=options.position_embedding_type,
            rotary_percent=options.rotary_percent,
            seq_len_interpolation_factor=options.seq_len_interpolation_factor,
            add_binary_head=has_binary_head,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
        )


def _layer(transformer_impl: str) -> Any:
    if transformer_impl == "transformer_engine":
        return get_bert_layer_with_transformer_engine_spec()
    return bert_layer_local_spec
