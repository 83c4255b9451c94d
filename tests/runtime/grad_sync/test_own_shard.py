"""Which gradients of tied embeddings two pipeline stages sum."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.fold3d.runtime.grad_sync.stage_gradients import own_shard
from tests.runtime.grad_sync.buckets import Group


def chunk(
    weight: torch.nn.Parameter, replica: int, *, is_sharded: bool = True, whole: bool = False
) -> Any:
    """A model chunk of three replicas, with ten gradients of one weight and two of padding."""
    bucket = SimpleNamespace(grad_data=torch.zeros(12), param_to_index={weight: (0, 10)})
    bucket_group = SimpleNamespace(
        param_to_bucket={weight: bucket},
        ddp_config=SimpleNamespace(use_distributed_optimizer=is_sharded),
        intra_distributed_optimizer_instance_group=Group(3, replica),
    )
    return SimpleNamespace(param_to_bucket_group={weight: bucket_group}, force_all_reduce=whole)


@pytest.fixture
def weight() -> Any:
    parameter: Any = torch.nn.Parameter(torch.zeros(5, 2))
    parameter.shared_embedding = True
    parameter.main_grad = torch.arange(10.0).view(5, 2)  # not always in the bucket
    return parameter


@pytest.mark.parametrize(("replica", "expected"), [(0, [0, 1, 2, 3]), (2, [8, 9])])
def test_each_replica_sums_its_shard_without_padding(weight: Any, replica: int, expected: Any):
    other = SimpleNamespace(param_to_bucket_group={})
    shard = own_shard([other, chunk(weight, replica)], weight, Group(2))
    assert shard is not None
    assert shard.tolist() == expected


def test_a_shard_of_padding_alone_is_empty(weight: Any):
    with_padding = chunk(weight, 2)
    bucket = with_padding.param_to_bucket_group[weight].param_to_bucket[weight]
    bucket.param_to_index[weight] = 0, 8
    shard = own_shard([with_padding], weight, Group(2))
    assert shard is not None
    assert shard.numel() == 0


@pytest.mark.parametrize(
    ("is_sharded", "whole", "stages"), [(False, False, 2), (True, True, 2), (True, False, 3)]
)
def test_all_gradients_are_summed_where_all_are_read_or_the_cut_matters(
    weight: Any, is_sharded: bool, whole: bool, stages: int
):
    ours = chunk(weight, 0, is_sharded=is_sharded, whole=whole)
    assert own_shard([ours], weight, Group(stages)) is None


def test_a_weight_without_a_bucket_of_its_own_is_summed_as_a_whole(weight: Any):
    weight.shared_embedding = False
    assert own_shard([chunk(weight, 0)], weight, Group(2)) is None
    weight.shared_embedding = True
    assert own_shard([SimpleNamespace()], weight, Group(2)) is None  # not in Megatron's DDP
