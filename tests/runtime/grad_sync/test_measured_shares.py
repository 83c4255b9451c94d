"""Shares that follow measured times, on two replicas of which one is slower."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.fold3d.runtime.grad_sync.measured_shares import Times
from tests.distributed import run_distributed

MEBIBYTE = 1 << 20


def test_a_change_is_counted_against_the_longest_time() -> None:
    times = Times((-2.0, -1.0, 0.0), (4.0, 1.0, 1.0))
    assert times.change(times) == 0
    assert Times((-2.0, -1.2, 0.0), (4.0, 1.0, 1.0)).change(times) == pytest.approx(0.05)
    assert Times((-2.0, -1.0, 0.0), (4.4, 1.0, 1.0)).change(times) == pytest.approx(0.1)
    still = Times((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    assert (still.change(still), times.change(still)) == (0.0, 4.0)


def test_the_lowest_segment_that_is_ready_goes_first() -> None:
    assert Times((0.0, -1.0, -2.0), (1.0, 2.0, 0.5)).shares() == (0.0, 0.5, 1.0)


@pytest.mark.gloo
def test_replicas_decide_together_by_the_slower_one() -> None:
    first, second = run_distributed(decisions, 2)
    assert first == second
    # Two iterations after one that was measured; the second time because the network is faster.
    assert [number for number, shares in enumerate(first, 1) if shares] == [6, 10]
    assert first[5] == pytest.approx((0.0, 0.5, 0.0))  # the first ends last, the third is kept
    assert first[9] == pytest.approx((0.0, 1.0, 0.0))


def decisions() -> list[tuple[float, ...] | None]:
    """What begins each iteration; 2 s pass between two backwards, and then DP.sync goes on."""
    from megatron.fold3d.runtime.grad_sync import measured_shares

    measured_shares.EVERY = 2
    now_s = 0.0
    time.perf_counter = lambda: now_s  # the clock of a CPU
    dist.init_process_group("gloo")
    auto = measured_shares.AutoShares(timedelta(minutes=1))
    auto.connect(3, dist.group.WORLD, torch.device("cpu"))
    results = []
    for iteration in range(1, 11):
        results.append(auto.begin_iteration())
        auto.ready(1, MEBIBYTE)
        ends = [auto.open_transfer(MEBIBYTE)]
        now_s += 2.0
        auto.ready(0, MEBIBYTE)
        ends.append(auto.open_transfer(MEBIBYTE))
        is_slow = dist.get_rank() == 1 and iteration < 8
        now_s += 6.0 if is_slow else 2.0
        for end in ends:
            end()
    dist.destroy_process_group()
    return results
