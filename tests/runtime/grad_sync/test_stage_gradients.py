"""Parts of a bucket, reduced to shards as they become complete."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fold3d.runtime.grad_sync import stage_gradients
from megatron.fold3d.runtime.grad_sync.stage_gradients import StageGradients, spread
from tests.distributed import run_distributed
from tests.runtime.grad_sync.buckets import Group, bucket_of, group_of

# Of a bucket of 12 gradients and three replicas: within a shard, over two edges, up to the ends.
PARTS = ((5, 7), (3, 5), (7, 12), (0, 3))


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("most_balanced", "started"),
    [(4, [0, 0, 1, 2]), (2, [2, 2, 3, 2])],  # together; to one owner at a time; cut in two
)
def test_all_parts_together_are_a_reduce_scatter(most_balanced: int, started: list[int]) -> None:
    found = run_distributed(_reduce_parts, 3, most_balanced)
    for rank, (numbers, own, expected) in enumerate(found):
        assert numbers == started
        assert own == expected, f"rank {rank}"


def _reduce_parts(most_balanced: int) -> tuple[list[int], list[float], list[float]]:
    """Return what each part started, the own shard then, and that of a reduce-scatter."""
    stage_gradients.MOST_BALANCED = most_balanced
    stage_gradients._SMALLEST = 1
    dist.init_process_group("gloo")
    group: Any = dist.group.WORLD
    data = (torch.arange(12.0).exp() * (group.rank() + 1)).round()  # any order sums up the same
    expected = torch.empty(4)
    dist.reduce_scatter_tensor(expected, data.clone())
    of_parts = {torch.nn.Parameter(torch.zeros(1)): part for part in PARTS}
    bucket_group = group_of(bucket_of(data, of_parts), group, is_sharded=True)
    chunk = SimpleNamespace(bucket_groups=[bucket_group], force_all_reduce=False)
    gradients, unfinished = StageGradients(chunk, 0), list(of_parts)
    transfers = []
    for parameter in of_parts:
        unfinished.remove(parameter)
        transfers.append(
            [
                half.reduce()
                for piece in gradients.complete(frozenset(unfinished))
                for half in piece.cut(piece.num_elements // 2)
                if half.num_elements
            ]
        )
    for transfer in [one for some in transfers for one in some]:
        transfer.wait()
    own = data[4 * group.rank() : 4 * group.rank() + 4].tolist()
    dist.destroy_process_group()
    return [len(some) for some in transfers], own, expected.tolist()


@pytest.mark.parametrize(
    ("is_sharded", "force_all_reduce", "a_there", "b_there"),
    [(True, False, [2, 0, 0], [1, 4, 3]), (True, True, [2], [8]), (False, False, [2], [8])],
)
def test_parameters_are_spread_over_shards(
    is_sharded: bool, force_all_reduce: bool, a_there: list[int], b_there: list[int]
):
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    bucket = bucket_of(torch.zeros(12), {a: (1, 3), b: (3, 11)})
    group = group_of(bucket, Group(3), is_sharded=is_sharded)
    chunk = SimpleNamespace(bucket_groups=[group], force_all_reduce=force_all_reduce)
    assert spread(chunk, {a}) == a_there
    assert spread(chunk, {b}) == b_there
    assert spread(chunk, {a, b}) == [x + y for x, y in zip(a_there, b_there, strict=True)]
