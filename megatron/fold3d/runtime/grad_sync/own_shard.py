"""The part of tied embeddings' gradients that a replica's optimizer reads.

Megatron gives tied word embeddings a bucket of their own in both stages that hold them, so their
shards begin and end at the same elements. A reduce-scatter leaves the sum over the replicas in the
own shard alone: what lies outside is neither complete nor read.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.runtime.grad_sync.bucket_groups import is_sharded, own_part


def own_shard(chunks: Sequence[Any], weight: Any, stages: dist.ProcessGroup) -> torch.Tensor | None:
    """Return a view of this replica's shard of a weight's gradients, or None for all of them.

    All of them are read where the optimizer is not distributed, where this iteration reduces whole
    gradients, or where Megatron lays the weight out as it does any other. If more than two stages
    hold it, rounding depends on how a sum is cut, so that it stays whole.

    Args:
        chunks: the rank's model chunks, in DDP.
        weight: any parameter of them.
        stages: the pipeline ranks that hold a copy of it.

    Returns:
        ``[num_elements of the shard]``, of what the optimizer reads; DDP owns the memory. It is
        empty if the replica's shard has padding alone.
    """
    if not getattr(weight, "shared_embedding", False) or stages.size() > 2:
        return None
    for chunk in chunks:
        bucket_group = getattr(chunk, "param_to_bucket_group", {}).get(weight)
        if bucket_group is not None and is_sharded(bucket_group) and not chunk.force_all_reduce:
            bucket = bucket_group.param_to_bucket[weight]
            data: torch.Tensor = weight.main_grad.view(-1)  # fp32 may have memory of its own
            return data[own_part(bucket_group, bucket, weight)]
    return None
