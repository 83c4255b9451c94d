"""Megatron's flat buffers of parameters and gradients; each replica owns a shard of a buffer."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from megatron.core.distributed.param_and_grad_buffer import shard_buffer

from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups

Data = Literal["param_data", "grad_data"]


def sharded_buffers(chunk: Any, data: Data) -> Iterator[torch.Tensor]:
    """Yield the flat buffers of a chunk that are sharded over replicas.

    Each is ``[num_elements]``, padded to a multiple of the number of replicas. Parameters have the
    model's dtype, gradients the one in which DDP reduces. Megatron's DDP owns the buffers.
    """
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        if buffer.data_parallel_world_size > 1:
            yield getattr(buffer, data)


def own_shards(chunk: Any, data: Data) -> Iterator[torch.Tensor]:
    """Yield one view per bucket: the shard of it that belongs to this replica's optimizer.

    Each is ``[num_elements / num_replicas]``, a contiguous part of a buffer that DDP owns.
    """
    for bucket_group in bucket_groups(chunk):
        size = bucket_group.intra_distributed_optimizer_instance_size
        rank = bucket_group.intra_distributed_optimizer_instance_rank
        for bucket in bucket_group.buckets if size > 1 else ():
            yield shard_buffer(getattr(bucket, data), size)[rank]


def free(buffer: torch.Tensor) -> None:
    """Free the storage of a buffer of `sharded_buffers`; its views keep the storage object.

    The current stream must have waited for all work of other streams on the buffer.
    """
    buffer.untyped_storage().resize_(0)


def allocate(buffer: torch.Tensor) -> None:
    """Allocate the freed storage of a buffer of `sharded_buffers`.

    Its content is undefined; the buffer and its views may be written on the current stream.
    """
    buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
