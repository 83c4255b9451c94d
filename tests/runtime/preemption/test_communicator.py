"""Transfers and sliced all-reduces of a few gloo ranks: right results, and one error for all."""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator, extension
from tests.distributed import RankError, run_distributed

TIMEOUT = timedelta(seconds=60)
pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(extension() is None, reason="needs the extension: make extension"),
]


def connected(timeout: timedelta = TIMEOUT) -> tuple[PreemptiveCommunicator, Any, Any]:
    """A communicator over all ranks, with a group for transfers and one for reductions."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    groups = [dist.new_group(timeout=timeout) for _ in range(2)]
    for group in groups:
        dist.barrier(group)
    communicator = PreemptiveCommunicator(slice_bytes=4096, timeout=timeout)
    communicator.connect([])
    return communicator, *map(communicator.group, groups)


def pass_on(group: Any, step: int, announced: bool) -> tuple[Any, Any, torch.Tensor]:
    """Send the step's tensor to the next rank and receive that of the one before."""
    rank, size = group.rank(), group.size()
    arriving = torch.empty(3000)
    receiving = dist.irecv(arriving, group=group, group_src=(rank - 1) % size)
    if announced:
        group.announce((rank + 1) % size, 1e-3)
        time.sleep(random.random() * 2e-3)
    leaving = torch.full((3000,), float(step * size + rank))
    return receiving, dist.isend(leaving, group=group, group_dst=(rank + 1) % size), arriving


def check_shares(group: Any, step: int) -> None:
    """Sum two tensors into shares and gather them again, within the tensors as Megatron does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wholes = [torch.arange(3000.0 * size) * (rank + step), torch.ones(3000 * size)]
    expected = [torch.arange(3000.0 * size) * (sum(range(size)) + step * size), size]
    shares = [whole.chunk(size)[rank] for whole in wholes]
    with _coalescing_manager(group, async_ops=True) as summing:
        for share, whole in zip(shares, wholes, strict=True):
            dist.reduce_scatter_tensor(share, whole, group=group, async_op=True)
    summing.wait()
    assert torch.equal(shares[0], expected[0].chunk(size)[rank])
    for share, whole in zip(shares, wholes, strict=True):
        dist.all_gather_into_tensor(whole, share, group=group)
    assert torch.equal(wholes[0], expected[0])
    assert torch.equal(wholes[1], torch.full((3000 * size,), float(size)))


def exchange_at_random_times() -> dict[str, float]:
    communicator, transfers, reductions = connected()
    rank, size = dist.get_rank(), dist.get_world_size()
    random.seed(rank)
    with communicator:
        for step in range(100):
            time.sleep(random.random() * 2e-3)
            whole = torch.arange(10_000.0) + step + rank
            expected = torch.arange(10_000.0) * size + step * size + sum(range(size))
            reducing = dist.all_reduce(whole, group=reductions, async_op=True)
            receiving, sending, arriving = pass_on(transfers, step, announced=step % 2 == 0)
            receiving.wait()
            assert torch.equal(
                arriving, torch.full((3000,), float(step * size + (rank - 1) % size))
            )
            sending.wait()
            (reducing.get_future() if step % 2 else reducing).wait()
            assert torch.equal(whole, expected)
            if step % 10 == 4:
                check_shares(reductions, step)
        statistics = communicator.statistics()
    other = PreemptiveCommunicator(slice_bytes=1 << 22, timeout=TIMEOUT, fits_slices=True)
    other.fit_slices(1 << 20, dist.group.WORLD, torch.device("cpu"))
    fitting = other._slice_bytes
    return {"transfers": statistics.transfers, "slices": statistics.slices, "fits": fitting}


def test_a_ring_of_ranks_gets_what_it_would_without():
    first, *others = run_distributed(exchange_at_random_times, 4)
    # Ten slices of 4 KiB each; of two shares of 3000 numbers six of 2 KiB, there and back.
    assert (first["transfers"], first["slices"]) == (200, 100 * 10 + 10 * 2 * 6 * 2)
    assert 1 << 18 <= first["fits"] <= 1 << 22
    assert all(seen == first for seen in others)


def lose_a_rank_in_mid_slice() -> None:
    communicator, _, reductions = connected()
    with communicator:
        dist.barrier()
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        start_s = time.monotonic()
        try:
            dist.all_reduce(torch.zeros(1 << 20), group=reductions)
        finally:
            assert time.monotonic() - start_s < 5


def test_when_a_rank_is_killed_all_others_say_so_and_what_they_waited_for():
    with pytest.raises(RankError) as caught:
        run_distributed(lose_a_rank_in_mid_slice, 6)
    texts = {failure.rank: failure.text for failure in caught.value.failures}
    assert texts.keys() == set(range(6))
    del texts[2]
    for text in texts.values():
        # Ranks next to it in the ring may see gloo's own error first; one of both is everybody's.
        [last] = re.findall("RuntimeError: (all-reduce 1 over ranks .*)", text)
        assert re.search(r"rank 2 has died|rank \d: all-reduce 1 .*, slice \d+ of 1024: ", last)


class FaultyGroup(dist.ProcessGroup):
    """A group whose third all-reduce meets a fault on rank 1."""

    def __init__(self, group: dist.ProcessGroup, fault: Callable[[], None]) -> None:
        super().__init__(group.rank(), group.size())
        self._group, self._fault, self._calls = group, fault, 0

    def allreduce(self, tensors: Any, options: Any) -> Any:
        self._calls += 1
        if self._calls == 3 and self.rank() == 1:
            self._fault()
        return self._group.allreduce(tensors, options)


def reduce_with(fault: Callable[[], None], timeout: timedelta) -> float:
    communicator, _, reductions = connected(timeout)
    with communicator:
        reductions.scheduled = FaultyGroup(reductions.scheduled, fault)
        tensor = torch.ones(1 << 14)
        dist.all_reduce(tensor, group=reductions)
    return float(tensor.mean())


def unplug() -> None:
    raise RuntimeError("the cable is unplugged")


def stall() -> None:
    time.sleep(6)


def test_a_slice_that_fails_ends_the_wait_of_every_rank():
    with pytest.raises(RankError) as caught:
        run_distributed(reduce_with, 4, unplug, TIMEOUT)
    assert len(caught.value.failures) == 4
    for failure in caught.value.failures:
        where = "rank 1: all-reduce 1 over ranks [0, 1, 2, 3], slice 3 of 16: RuntimeError: "
        assert where + "the cable is unplugged" in failure.text


def test_a_slice_that_is_late_ends_the_wait_of_every_rank_only_after_the_timeout():
    assert run_distributed(reduce_with, 4, stall, TIMEOUT) == [4.0] * 4
    with pytest.raises(RankError) as caught:
        run_distributed(reduce_with, 4, stall, timedelta(seconds=4))
    assert len(caught.value.failures) == 4
    late = r"all-reduce 1 over ranks \[0, 1, 2, 3\], slice [34] of 16: "  # both are under way
    for failure in caught.value.failures:
        assert re.search(late, failure.text)
