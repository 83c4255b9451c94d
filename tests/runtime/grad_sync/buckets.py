"""What gradient sync asks of Megatron's buckets and bucket groups, and no more."""

from types import SimpleNamespace
from typing import Any

import torch


class Group:
    """A process group, as one of its ranks sees it."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank = (lambda: size), (lambda: rank)


class Bucket(SimpleNamespace):
    """Like Megatron's, equal to itself only."""

    __hash__ = object.__hash__
    params_with_extra_main_grads = ()
    gradient_scaling_factor = 1.0


def bucket_of(data: torch.Tensor, ranges: dict[torch.nn.Parameter, tuple[int, int]]) -> Bucket:
    """A bucket whose parameters have these parts of the data; the last one is ready first."""
    return Bucket(grad_data=data, params=[*ranges][::-1], param_to_index=ranges)


def group_of(bucket: Bucket, replicas: Any, *, is_sharded: bool = False) -> Any:
    """A bucket group that replicas sum, into shards or not."""
    config = SimpleNamespace(
        check_for_nan_in_grad=False,
        check_for_large_grads=False,
        average_in_collective=False,
        use_distributed_optimizer=is_sharded,
        reduce_scatter_with_fp32_accumulation=False,
    )
    return Bucket(
        buckets=[bucket],
        ddp_config=config,
        data_parallel_group=replicas,
        intra_distributed_optimizer_instance_group=replicas,
        grad_reduce_finished=False,
    )
