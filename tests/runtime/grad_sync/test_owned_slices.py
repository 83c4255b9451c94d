"""Parts of a bucket, reduced to the owners of its shards."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fold3d.runtime.grad_sync.complete_parts import Part
from megatron.fold3d.runtime.grad_sync.owned_slices import reduce_to_owners
from tests.distributed import run_distributed

# Of a bucket of 12 gradients and three replicas: within a shard, over two edges, up to the ends.
PARTS = ((5, 7), (3, 5), (7, 12), (0, 3))


@pytest.mark.gloo
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_all_parts_together_are_a_reduce_scatter(backend: str) -> None:
    for rank, (found, expected) in enumerate(run_distributed(_reduce_parts, 3, backend)):
        assert found == expected, f"rank {rank}"


def _reduce_parts(backend: str) -> tuple[list[float], list[float]]:
    """Return the own shard after all parts were reduced, and after a reduce-scatter.

    Args:
        backend: what the group says that it is, so that both ways to reduce run over gloo.
    """
    dist.init_process_group("gloo")
    group: Any = dist.group.WORLD
    data = (torch.arange(12.0).exp() * (group.rank() + 1)).round()  # any order sums up the same
    expected = torch.empty(4)
    dist.reduce_scatter_tensor(expected, data.clone())
    dist.get_backend = lambda *_: backend
    bucket = SimpleNamespace(grad_data=data)
    bucket_group = SimpleNamespace(
        ddp_config=SimpleNamespace(average_in_collective=False, use_distributed_optimizer=True),
        intra_distributed_optimizer_instance_group=group,
    )
    works = [
        work
        for begin, end in PARTS
        for work in reduce_to_owners(Part(bucket_group, bucket, begin, end))
    ]
    for work in works:
        work.wait()
    own = data[4 * group.rank() : 4 * group.rank() + 4].tolist()
    dist.destroy_process_group()
    return own, expected.tolist()
