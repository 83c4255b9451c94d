"""Coalesced all-gathers of gloo."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from fold3d_patches import cpu
from fold3d_patches.registry import apply
from tests.distributed import run_distributed

pytestmark = pytest.mark.gloo


def test_several_tensors_are_gathered_at_once() -> None:
    for gathered in run_distributed(_gather_two, 2):
        assert gathered == [[0.0, 0.0, 1.0, 1.0], [10.0, 11.0]]


def _gather_two() -> list[list[float]]:
    with apply(cpu.patches()):
        dist.init_process_group("gloo")
        rank = float(dist.get_rank())
        parts = torch.full((2,), rank), torch.tensor([10.0 + rank])
        wholes = torch.zeros(4), torch.zeros(2)
        with _coalescing_manager(async_ops=True) as gathering:
            for whole, part in zip(wholes, parts, strict=True):
                dist.all_gather_into_tensor(whole, part)
        gathering.wait()
        assert all(one.is_completed() for works in gathering.works for one in works.works)
        return [whole.tolist() for whole in wholes]


def test_gathers_that_end_at_once_do_not_corrupt_memory() -> None:
    """Without the patch this rank dies, as a rule within its first ten thousand gathers."""
    run_distributed(_gather_often, 1)


def _gather_often() -> None:
    with apply(cpu.patches()):
        dist.init_process_group("gloo")
        part, whole = torch.ones(4), torch.empty(4)
        for _ in range(1000):
            started = []
            for _ in range(64):
                with _coalescing_manager(async_ops=True) as gathering:
                    dist.all_gather_into_tensor(whole, part)
                started.append(gathering)
            for gathering in started:
                gathering.wait()
