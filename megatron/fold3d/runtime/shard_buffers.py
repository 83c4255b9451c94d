"""Megatron's flat buffers of parameters and gradients, of which each replica owns a shard."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from megatron.core.distributed.param_and_grad_buffer import shard_buffer

from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups

Data = Literal["param_data", "grad_data"]


def sharded_buffers(chunk: Any, data: Data) -> Iterator[torch.Tensor]:
    """Yield the flat buffers of a chunk that replicas share; those of experts may have none."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        if buffer.data_parallel_world_size > 1:
            yield getattr(buffer, data)


def own_shards(chunk: Any, data: Data) -> Iterator[torch.Tensor]:
    """Yield a 1-D view per bucket: what this replica's optimizer updates, or updates with."""
    for bucket_group in bucket_groups(chunk):
        size = bucket_group.intra_distributed_optimizer_instance_size
        rank = bucket_group.intra_distributed_optimizer_instance_rank
        for bucket in bucket_group.buckets if size > 1 else ():
            yield shard_buffer(getattr(bucket, data), size)[rank]


def free(buffer: torch.Tensor) -> None:
    """Free the storage of a buffer, which its views keep referring to."""
    buffer.untyped_storage().resize_(0)


def allocate(buffer: torch.Tensor) -> None:
    """Allocate the freed storage of a buffer, flat and contiguous; its content is undefined."""
    buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
