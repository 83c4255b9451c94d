"""Train a GPT: Megatron's own flags, loop, checkpoints and data, under a schedule of fold3d.

    torchrun --nproc-per-node 4 pretrain_gpt.py --device cpu --schedule aiao --segments 2 \
        --pipeline-model-parallel-size 2 --num-layers 8 --hidden-size 64 ... --mock-data
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args, parse_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

import fold3d_patches
from fold3d_patches.cpu.flags import FLAGS as CPU_FLAGS
from megatron.fold3d.config import Fold3DConfig, add_arguments

Batch = dict[str, Any]


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """The tensors that this virtual stage needs; tensor-parallel rank 0 reads and sends them."""
    args = get_args()
    batch: Batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        batch = {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}
    ends = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return get_batch_on_this_tp_rank(
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
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(**ends),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(**ends),
    )


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses ``[batch, seq]`` that count, how many they are, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.dot(output.view(-1).float(), mask)
    if get_args().check_for_nan_in_loss_and_grad:
        for refused in (torch.isnan, torch.isinf):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=refused,
                message=f"found {refused.__name__} in the local forward loss",
                tolerance=0.0,  # a forward pass repeats exactly
                fatal=True,
            )
    num_tokens = mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}


def forward_step(
    data_iterator: Iterator[Batch] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """One micro-batch through one model chunk, and what turns its output into a loss."""
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = get_batch(data_iterator, vp_stage) if is_first_or_last_pipeline_stage(vp_stage) else {}
    timer.stop()
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
    )
    return output, functools.partial(loss_func, batch.get("loss_mask"))


def build_datasets(num_samples: Sequence[int], vp_stage: int | None = None) -> Any:
    """Training, validation and test data, on the ranks that read them."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        full_validation=args.full_validation,
        multiple_validation_sets=args.multiple_validation_sets,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    reads = functools.partial(_reads_data, vp_stage)
    return BlendedMegatronDatasetBuilder(kind, num_samples, reads, config).build()


build_datasets.is_distributed = True  # type: ignore[attr-defined]  # the builder asks `reads`


def _reads_data(vp_stage: int | None) -> bool:
    first = mpu.get_tensor_model_parallel_rank() == 0
    return first and is_first_or_last_pipeline_stage(vp_stage)


def prepare(argv: Sequence[str]) -> tuple[ExitStack, Any]:
    """Read and check the flags, patch Megatron; the patches and Megatron's configuration."""
    sys.argv[1:] = [*CPU_FLAGS, *argv] if "cpu" in argv else argv
    config = Fold3DConfig.from_args(parse_args(add_arguments))
    patched = fold3d_patches.install(config)
    args = parse_and_validate_args(add_arguments)
    return patched, pretrain_cfg_container_from_args(args, gpt_config_from_args(args))


def main(argv: Sequence[str]) -> int:
    """Train as the flags say; the exit code."""
    try:
        patched, container = prepare(argv)
    except (ValueError, AssertionError, OSError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"pretrain_gpt.py: error: {error}", file=sys.stderr)
        return 2
    with patched:
        pretrain(container, build_datasets, ModelType.encoder_or_decoder, forward_step)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
