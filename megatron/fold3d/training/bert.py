"""A BERT for ``megatron.training.pretrain``: its model, its data, its batches and its losses.

It fills in masked words and, with the binary head, tells whether the two halves of a text are in
their order. Megatron's wheel leaves this side to the user's script.
"""

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.models.bert.bert_layer_specs import (
    bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers

from megatron.fold3d.training.pretraining import check_loss, check_run, dataset_options
from megatron.fold3d.upstream.pretrain import (
    GPTModelBuilder,
    GPTModelConfig,
    gpt_config_from_args,
)

NOT_BERT = (
    "calculate_per_token_loss",  # the two losses count different things
    "fim_data",
    "hybrid_layer_pattern",
    "logits_load_dir",
    "mock_data",
    "mtp_num_layers",
    "num_experts",
    "perform_rl_step",
    "sft",
    "vision_pretraining",
)
# Of a sample of Megatron's dataset; all of them are integers.
KEYS = ("text", "types", "labels", "is_random", "loss_mask", "padding_mask")
NUM_TOKEN_TYPES = 2  # for the first and the second segment of text

Batch = dict[str, torch.Tensor]


class BertModelConfig(GPTModelConfig):  # type: ignore[misc]  # Megatron has no types
    """The options of a BERT: those of a GPT. Megatron's wheel has a builder only for GPT."""

    builder: ClassVar[str] = "megatron.fold3d.training.bert.BertModelBuilder"


class BertModelBuilder(GPTModelBuilder):  # type: ignore[misc]
    """Builds one model chunk; what wraps and distributes chunks is Megatron's."""

    def build_model(
        self,
        pg_collection: Any,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None = None,
    ) -> BertModel:
        """Return the chunk of a virtual stage, with the embedding and the heads if asked for.

        The vocabulary is padded: Megatron does so when it builds the tokenizer.
        """
        options, has_binary_head = self._model_config, get_args().bert_binary_head
        return BertModel(
            config=options.transformer,
            num_tokentypes=NUM_TOKEN_TYPES if has_binary_head else 0,
            transformer_layer_spec=_layer(options.transformer_impl),
            vocab_size=options.vocab_size,
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


def config(args: Namespace) -> Any:
    """Return what Megatron builds the model from."""
    return gpt_config_from_args(args, model_config_cls=BertModelConfig)


def get_batch(data_iterator: Iterator[dict[str, Any]] | None) -> Batch:
    """Return one micro-batch, which the first tensor-parallel rank reads and broadcasts.

    Its tensors are int64 on the device, ``[batch, seq]`` but for ``is_random``, ``[batch]``.

    Every stage needs one, for the padding that its attention must not see.
    """
    sample = None
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        sample = next(data_iterator)
    return dict(tensor_parallel.broadcast_data(KEYS, sample, torch.int64))


def loss_func(
    batch: Batch, output: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a micro-batch, 0-d, and its parts for the log.

    Each part is ``[2]`` in fp32: the sum of its terms and their number. All are on the device, and
    valid on the current stream.

    Args:
        output: the loss of each token ``[batch, seq]``, and the logits of the binary head
            ``[batch, 2]``; the model's.
    """
    of_tokens, order = output
    mask = batch["loss_mask"].float()
    words = torch.stack([(of_tokens.float() * mask).sum(), mask.sum()])
    parts = {"lm loss": words}
    if order is not None:
        swapped = torch.nn.functional.cross_entropy(
            order.float(), batch["is_random"], reduction="sum"
        )
        parts["sop loss"] = torch.stack([swapped, swapped.new_tensor(len(order))])
    loss = torch.stack([total / count for total, count in parts.values()]).sum()
    check_loss(loss)
    return loss, {name: part.detach() for name, part in parts.items()}


def forward_step(
    data_iterator: Iterator[dict[str, Any]] | None, model: torch.nn.Module
) -> tuple[Any, Callable[..., Any]]:
    """Run one micro-batch through one model chunk; return its output and its loss function."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = get_batch(data_iterator)
    timer.stop()
    has_binary_head = get_attr_wrapped_model(model, "add_binary_head")
    output = model(
        batch["text"],
        batch["padding_mask"],
        tokentype_ids=batch["types"] if has_binary_head else None,
        lm_labels=batch["labels"],
    )
    return output, functools.partial(loss_func, batch)


def build_datasets(num_samples: Sequence[int], vp_stage: int | None = None) -> Any:
    """Training, validation and test data, on the ranks that read them."""
    args = get_args()
    options = BERTMaskedWordPieceDatasetConfig(
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=args.bert_binary_head,
        **dataset_options(args, BERTMaskedWordPieceDatasetConfig),
    )
    return BlendedMegatronDatasetBuilder(
        BERTMaskedWordPieceDataset,
        num_samples,
        lambda: mpu.get_tensor_model_parallel_rank() == 0,
        options,
    ).build()


build_datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it


def check(args: Namespace) -> None:
    """Refuse options that this BERT does not support, and data that do not exist.

    Raises:
        ValueError: one message in the form found, rule, fix.
    """
    check_run(args, NOT_BERT, "a BERT on documents")
    if args.context_parallel_size > 1:
        raise ValueError(
            f"--context-parallel-size {args.context_parallel_size}: a BERT's padding is not split "
            "over ranks; use --tensor-model-parallel-size"
        )
    if args.position_embedding_type not in ("learned_absolute", "rope"):
        raise ValueError(
            f"--position-embedding-type {args.position_embedding_type}: Megatron-core's BERT has "
            "learned_absolute and rope"
        )
    _check_tokenizer(build_tokenizer(args))


def _check_tokenizer(tokenizer: Any) -> None:
    try:
        has_all = None not in (tokenizer.cls, tokenizer.sep, tokenizer.mask, tokenizer.pad)
    except (AttributeError, NotImplementedError):  # Megatron's tokenizers differ in this
        has_all = False
    if not has_all:
        raise ValueError(
            "a BERT's tokenizer has [CLS], [SEP], [MASK] and [PAD]; give --tokenizer-type "
            "HuggingFaceTokenizer --tokenizer-model DIR with a WordPiece tokenizer in DIR"
        )
    if tokenizer.pad != 0:
        raise ValueError(
            f"[PAD] is token {tokenizer.pad} of the tokenizer; Megatron's BERT dataset marks "
            "padding by its number, which must be 0"
        )
