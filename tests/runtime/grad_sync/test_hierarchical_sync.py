"""Sums inside nodes first: which ranks form them, and the order of additions."""

import os
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed

Array = np.ndarray[Any, Any]


@pytest.mark.parametrize(
    ("ranks", "nodes"),
    [
        ((0, 1, 2, 3), [(0, 1), (2, 3)]),
        ((0, 2), []),  # one on each node
        ((0, 1), []),  # all on one node
        ((0, 1, 2, 3, 4), []),  # two, two and one
        ((1, 2, 4), []),
        ((0, 1, 4, 5), [(0, 1), (4, 5)]),
        ((1,), []),
    ],
)
def test_sums_are_hierarchical_where_equally_many_ranks_share_each_of_several_nodes(
    ranks: tuple[int, ...], nodes: list[tuple[int, ...]]
) -> None:
    from megatron.fold3d.runtime.grad_sync.hierarchical_sync import shared_nodes

    assert shared_nodes(ranks, ["a", "a", "b", "b", "c", "c"]) == nodes


@pytest.mark.gloo
def test_nodes_are_summed_first_and_bit_for_bit_in_that_order() -> None:
    by_rank = run_distributed(sums, 4)
    a, b, c, d = (before for before, _ in by_rank)
    by_hand = [(w + x) + (y + z) for w, x, y, z in zip(a, b, c, d, strict=True)]
    in_another_order = [(w + y) + (x + z) for w, x, y, z in zip(a, b, c, d, strict=True)]
    for _, after in by_rank:
        assert all(map(np.array_equal, after, by_hand))
        assert not all(map(np.array_equal, after, in_another_order))


def sums() -> tuple[list[Array], list[Array]]:
    """All-reduce some tensors over two nodes of two ranks; with what was there before."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    from megatron.fold3d.runtime.grad_sync.bucket_groups import ranks_of
    from megatron.fold3d.runtime.grad_sync.hierarchical_group import HierarchicalGroup
    from megatron.fold3d.runtime.grad_sync.hierarchical_sync import connect_with_nodes

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(rank % 2)
    everyone, node = (0, 1, 2, 3), (0, 1) if rank < 2 else (2, 3)
    groups = [(0, 1), everyone, (2, 3)]
    made = connect_with_nodes(groups, torch.device("cpu"), timedelta(minutes=1))
    assert set(made) == {everyone, node}
    assert not isinstance(made[node], HierarchicalGroup)
    group = made[everyone]
    assert isinstance(group, HierarchicalGroup)
    assert (ranks_of(group), group.rank(), group.size()) == (everyone, rank, 4)
    generator = torch.Generator().manual_seed(rank)
    # Even, odd, and fewer elements than a node has ranks; more than one is under way at once.
    data = [torch.randn(size, generator=generator) for size in (1000, 7, 1, 4, 501, 1000)]
    before = [part.numpy().copy() for part in data]
    works: list[Any] = [dist.all_reduce(part, group=group, async_op=True) for part in data[:4]]
    with _coalescing_manager(group, async_ops=True) as works_of_two:
        for part in data[4:]:
            dist.all_reduce(part, group=group)
    for work in works:
        work.wait()
        assert work.is_completed()
    works_of_two.wait()
    dist.destroy_process_group()
    return before, [part.numpy() for part in data]


@pytest.mark.gloo
def test_a_failed_step_is_raised_by_the_wait() -> None:
    assert run_distributed(failing, 1) == ["lost"]


def failing() -> str:
    """Wait for a sum whose second step fails, and for one behind it."""
    from collections.abc import Iterator

    from megatron.fold3d.runtime.grad_sync.hierarchical_group import _Threads

    def steps(error: str) -> Iterator[list[Any]]:
        yield []
        if error:
            raise RuntimeError(error)
        yield []
        yield []

    threads = _Threads("test")
    first, second = threads.run(steps("lost")), threads.run(steps(""))
    assert second.wait()
    second.get_future().wait()
    with pytest.raises(RuntimeError) as raised:
        first.wait()
    return str(raised.value)
