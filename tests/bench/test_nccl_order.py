"""Collectives in NCCL's order: results are gloo's, turns are taken, errors reach who waits."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import distributed_c10d

from fold3d_patches import registry
from scripts.bench import nccl_order
from scripts.bench.nccl_order import OrderedQueue

TIMEOUT = timedelta(seconds=30)


def test_works_run_one_at_a_time_in_order_of_issue():
    ran, first_may_end = [], threading.Event()
    turns = OrderedQueue("test")

    def first():
        first_may_end.wait(10)
        ran.append(1)

    works = [turns.submit(first), turns.submit(lambda: ran.append(2))]
    assert not any(work.is_completed() for work in works)
    first_may_end.set()
    assert works[1].wait()
    assert ran == [1, 2]
    assert all(work.is_completed() and work.is_success() for work in works)


def test_an_error_reaches_who_waits_and_later_works_still_run():
    turns = OrderedQueue("test")
    failed, ran = turns.submit(lambda: [][0]), turns.submit(lambda: None)
    with pytest.raises(IndexError):
        failed.wait()
    assert failed.is_completed()
    assert not failed.is_success()
    assert ran.wait()


def on_ranks(size, function):
    """What ``function(rank, group)`` returns on each rank; the ranks are threads."""
    store = dist.HashStore()

    def run(rank):
        return function(rank, dist.ProcessGroupGloo(store, rank, size, TIMEOUT))

    with ThreadPoolExecutor(size) as ranks:
        return [*ranks.map(run, range(size))]


@pytest.mark.gloo
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_ring_sums_every_share_into_its_owner_even_in_place(size):
    contributions = [torch.arange(5.0 * size) * (rank + 1) for rank in range(size)]
    expected = sum(contributions).chunk(size)

    def scatter(rank, group):
        output = contributions[rank].chunk(size)[rank]  # a part of the input, as Megatron's is
        nccl_order.reduce_scatter(group, output, contributions[rank])
        return output

    for output, sums in zip(on_ranks(size, scatter), expected, strict=True):
        assert torch.equal(output, sums)


@pytest.mark.gloo
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_ring_gathers_every_share_even_in_place(size):
    def gather(rank, group):
        output = torch.full((size, 3), -1.0)
        output[rank] = rank
        nccl_order.all_gather(group, output, output[rank])
        return output

    expected = torch.arange(float(size)).unsqueeze(1).expand(size, 3)
    assert all(torch.equal(output, expected) for output in on_ranks(size, gather))


@pytest.mark.gloo
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_gets_its_rows_of_every_other_be_they_none(size):
    def rows(sender, receiver):
        return torch.full(((sender + receiver) % 3, 2), 10.0 * sender + receiver)

    def exchange(rank, group):
        mine = [rows(rank, other) for other in range(size)]
        theirs = [len(rows(other, rank)) for other in range(size)]
        received = torch.empty(sum(theirs), 2)
        nccl_order.all_to_all(group, received, torch.cat(mine), theirs, list(map(len, mine)))
        return received

    for rank, received in enumerate(on_ranks(size, exchange)):
        assert torch.equal(received, torch.cat([rows(other, rank) for other in range(size)]))


@pytest.mark.gloo
def test_patched_collectives_equal_gloos(tmp_path):
    torch.multiprocessing.spawn(_compare_collectives, (tmp_path / "store",), nprocs=2)


def _compare_collectives(rank, store):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2, timeout=TIMEOUT)
    plain = _collectives(rank)
    with registry.apply(nccl_order.patches()):
        assert isinstance(dist.barrier(async_op=True), nccl_order.OrderedWork)
        patched = _collectives(rank)
    for one, other in zip(plain, patched, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(_collectives(rank)[0], plain[0])  # and gloo's own are back
    dist.destroy_process_group()


def _collectives(rank):
    """What Megatron does to its buckets, several at once, alone and coalesced."""
    world = dist.group.WORLD
    reduced, gathered = torch.arange(8.0) * (rank + 1), torch.zeros(8)
    gathered[4 * rank : 4 * rank + 4] = rank + 1
    buckets = [torch.arange(6.0) + rank, torch.arange(10.0) * rank]
    told = torch.tensor([float(rank + 3)])
    objects, exchanged = [None, None], torch.zeros(8)
    works = [dist.all_reduce(reduced, async_op=True)]
    with distributed_c10d._coalescing_manager(world, async_ops=True) as coalesced:
        for bucket in buckets:
            dist.reduce_scatter_tensor(bucket.chunk(2)[rank], bucket, group=world, async_op=True)
    works.append(coalesced)
    works.append(
        dist.all_gather_into_tensor(gathered, gathered.chunk(2)[rank].clone(), async_op=True)
    )
    works.append(dist.all_to_all_single(exchanged, torch.arange(8.0) * rank, async_op=True))
    dist.broadcast(told, 0)
    dist.all_gather_object(objects, rank)
    for work in works:
        work.wait()
    assert objects == [0, 1]
    return [reduced, gathered, exchanged, told, *(bucket.chunk(2)[rank] for bucket in buckets)]
