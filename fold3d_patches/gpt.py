"""A GPT for ``megatron.training.pretrain``: its data, its batches and its loss.

Megatron's wheel leaves these to the user's script.
"""

import functools
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

# Options that Megatron's flags and its dataset call by one name.
SAME_NAMES = (
    "allow_ambiguous_pad_tokens",
    "context_parallel_size",
    "eod_mask_loss",
    "full_validation",
    "mid_level_dataset_surplus",
    "mmap_bin_files",
    "multiple_validation_sets",
    "num_dataset_builder_threads",
    "object_storage_cache_path",
    "reset_attention_mask",
    "reset_position_ids",
    "split",
)
# Options for another model or other data; to ignore them would be to train something else.
NOT_PLAIN_GPT = (
    "dataloader_inter_document_masking",
    "fim_data",
    "hybrid_context_parallel",
    "hybrid_layer_pattern",
    "perform_rl_step",
    "sft",
    "vision_pretraining",
)

Batch = dict[str, Any]


def predicts_further(vp_stage: int | None) -> bool:
    """Whether multi-token prediction, which reads the tokens again, is on this virtual stage."""
    args = get_args()
    layout = _layout(args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size)
    return bool(
        mtp_on_this_rank(layout, args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage)
    )


@functools.cache
def _layout(text: str | None, num_ranks: int) -> PipelineParallelLayerLayout | None:
    return PipelineParallelLayerLayout(text, num_ranks) if text else None


def reads_data(vp_stage: int | None) -> bool:
    """Whether this virtual stage embeds tokens or compares its output with labels."""
    return is_first_or_last_pipeline_stage(vp_stage) or predicts_further(vp_stage)


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """One micro-batch: the first tensor-parallel rank reads it and sends what this stage needs."""
    args = get_args()
    batch: Batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        batch = {
            name: tensor.cuda(non_blocking=True) for name, tensor in next(data_iterator).items()
        }
    stage = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_further(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(**stage),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(**stage),
    )
    cp_group = mpu.get_context_parallel_group()
    return dict(get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group))


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses ``[batch, seq]`` that count, how many count, and both for the log."""
    loss = (output.float() * loss_mask).sum()
    if get_args().check_for_nan_in_loss_and_grad:
        for is_wrong in (torch.isnan, torch.isinf):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=is_wrong,
                message=f"{is_wrong.__name__} of the loss of a micro-batch",
                tolerance=0.0,  # a forward pass repeats exactly
                fatal=True,
            )
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(
    data_iterator: Iterator[Batch] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """One micro-batch through one model chunk, and what makes a loss of the last chunk's output."""
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = get_batch(data_iterator, vp_stage) if reads_data(vp_stage) else {}
    timer.stop()
    inputs = (batch.get(name) for name in ("tokens", "position_ids", "attention_mask"))
    loss_mask: Any = batch.get("loss_mask")
    output = model(*inputs, labels=batch.get("labels"), loss_mask=loss_mask)
    return output, functools.partial(loss_func, loss_mask)


def build_datasets(num_samples: Sequence[int], vp_stage: int | None = None) -> Any:
    """Training, validation and test data, on the ranks that read them."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = args.per_dataset_sequences_path
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        tokenizer=get_tokenizer(),
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        sequences_per_dataset=json.loads(Path(sequences).read_text()) if sequences else None,
        **{name: getattr(args, name) for name in SAME_NAMES},
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        lambda: mpu.get_tensor_model_parallel_rank() == 0 and reads_data(vp_stage),
        config,
    ).build()


build_datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it


def check(args: Namespace) -> None:
    """Refuse another model's options, and data or kernels that are not there.

    Raises:
        ValueError: what was asked for, why it cannot be, and what can.
    """
    if foreign := ["--" + name.replace("_", "-") for name in NOT_PLAIN_GPT if getattr(args, name)]:
        raise ValueError(f"{', '.join(foreign)}: this script trains a GPT on plain documents")
    if args.transformer_impl == "transformer_engine" and find_spec("transformer_engine") is None:
        raise ValueError(
            "--transformer-impl transformer_engine: Transformer Engine is not installed; "
            'run pip install "fold3d[gpu]", or give --transformer-impl local'
        )
    if args.eval_interval is None:
        raise ValueError(
            "--eval-interval is missing: Megatron counts evaluations with it even where "
            "--eval-iters is 0; give the number of iterations between two, say 1000"
        )
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    prefixes = [prefix for b in (blend, *(blend_per_split or ())) if b for prefix in b[0]]
    missing = [prefix for prefix in prefixes if not IndexedDataset.exists(prefix)]
    if missing or not (prefixes or args.mock_data):
        raise ValueError(
            f"no data{' at ' if missing else ''}{', '.join(missing)}: --data-path takes the path "
            "of a .bin and an .idx file, without the ending; make them with "
            "scripts/prepare_data.py, or give --mock-data"
        )
