"""A GPT for ``megatron.training.pretrain``: its model, its data, its batches and its loss.

Megatron's wheel leaves these to the user's script.
"""

import functools
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron.fold3d.training.pretraining import check_loss, check_run, dataset_options
from megatron.fold3d.upstream.pretrain import (
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    gpt_config_from_args,
    mtp_on_this_rank,
)

NOT_PLAIN_GPT = (
    "dataloader_inter_document_masking",
    "fim_data",
    "hybrid_context_parallel",
    "hybrid_layer_pattern",
    "logits_load_dir",
    "perform_rl_step",
    "sft",
    "vision_pretraining",
)

Batch = dict[str, Any]


def predicts_further(vp_stage: int | None) -> bool:
    """True if multi-token prediction, which reads the tokens again, is on this virtual stage."""
    args = get_args()
    layout = args.pipeline_model_parallel_layout
    if layout is not None:
        layout = PipelineParallelLayerLayout.from_str(layout, args.pipeline_model_parallel_size)
    return mtp_on_this_rank(layout, args.mtp_num_layers, vp_stage)


def reads_data(vp_stage: int | None) -> bool:
    """Return True if this virtual stage embeds tokens or compares its output with labels."""
    return is_first_or_last_pipeline_stage(vp_stage) or predicts_further(vp_stage)


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """Return what this stage needs of a micro-batch; the first tensor-parallel rank reads it.

    Tensors are on the device and valid on the current stream: ``[batch, seq]``, but for an
    attention mask, with seq split by context parallelism.
    """
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
    return get_batch_on_this_cp_rank(batch, mpu.get_context_parallel_group())


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the losses that count, how many count, and both for the log.

    Args:
        loss_mask: ``[batch, seq]`` in fp32, 1 where a token counts; of the micro-batch.
        output: the loss of each token, in the shape of ``loss_mask``; the model's.

    Returns:
        The sum, 0-d in fp32; the number, 0-d in int32; ``[2]`` of both by name. All are on the
        device and valid on the current stream.
    """
    loss = (output.float() * loss_mask).sum()
    check_loss(loss)
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def forward_step(
    data_iterator: Iterator[Batch] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """Run one micro-batch through one model chunk; return its output and its loss function.

    The output is ``[seq, batch, hidden]``, or of the last chunk the loss of each token,
    ``[batch, seq]``; valid on the current stream. The loss function applies to the latter. Stock's
    schedule for ``--overlap-moe-expert-parallel-comm`` asks for the steps in place of an output.
    """
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = get_batch(data_iterator, vp_stage) if reads_data(vp_stage) else {}
    timer.stop()
    inputs = (batch.get(name) for name in ("tokens", "position_ids", "attention_mask"))
    loss_mask: Any = batch.get("loss_mask")
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(*inputs, labels=batch.get("labels"), loss_mask=loss_mask)
    return output, functools.partial(loss_func, loss_mask)


def build_datasets(num_samples: Sequence[int], vp_stage: int | None = None) -> Any:
    """Training, validation and test data, on the ranks that read them."""
    args = get_args()
    sequences = args.per_dataset_sequences_path
    options = GPTDatasetConfig(
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        sequences_per_dataset=json.loads(Path(sequences).read_text()) if sequences else None,
        **dataset_options(args, GPTDatasetConfig),
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        lambda: mpu.get_tensor_model_parallel_rank() == 0 and reads_data(vp_stage),
        options,
    ).build()


build_datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it


def config(args: Namespace) -> Any:
    """Return what Megatron builds the model from."""
    return gpt_config_from_args(args)


def check(args: Namespace) -> None:
    """Refuse options that this GPT does not support, and data that do not exist.

    Raises:
        ValueError: one message in the form found, rule, fix.
    """
    check_run(args, NOT_PLAIN_GPT, "a GPT on plain documents")
