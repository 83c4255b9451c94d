"""Tensors pass from host to host as they are, through slots that are used again."""

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.runtime.transfers.host_link import HostLink
from tests.distributed import run_distributed

NUM_TENSORS = 12
SHAPE = (256, 3)
LAST = 1  # rank of the pipeline


def pass_on(kind: str) -> tuple[int, int]:
    """Send from the last rank to the first; returns how often a pool grew, and its slots."""
    dist.init_process_group("gloo")
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    link = HostLink(dist.new_group(), device)
    program = [Action(2, Op.RECV_F, 0), Action(2, Op.FORWARD, 0)]
    link.begin_iteration(tuple(program), torch.Size(SHAPE).numel() * 4)
    for number in range(NUM_TENSORS):
        expected = torch.arange(3 * 256.0, device=device).view(3, 256).t() + number
        if dist.get_rank() == LAST:
            if kind == "cuda":
                torch.cuda._sleep(10_000_000)  # what does not wait for compute sends zeros
            tensor = torch.zeros(3, 256, device=device).t()
            tensor += expected  # as some gradients are: not contiguous
            link.send(Action(1, Op.SEND_F, number), tensor)
            del tensor
        else:
            link.post(Action(2, Op.RECV_F, number), SHAPE, torch.float32)
            assert torch.equal(link.take(Action(2, Op.RECV_F, number)), expected)
    link.drain()
    return link.pool.num_growths, link.pool.num_bytes // (256 * 3 * 4)


def take_first() -> bool:
    """Take the first of two tensors; returns whether the second then gets to the device."""
    dist.init_process_group("gloo")
    link = HostLink(dist.new_group(), torch.device("cpu"))
    receives = [Action(2, Op.RECV_F, number) for number in range(2)]
    link.begin_iteration((*receives, *(Action(2, Op.FORWARD, number) for number in range(2))), 64)
    if dist.get_rank() == LAST:
        for number in range(2):
            link.send(Action(1, Op.SEND_F, number), torch.full((16,), float(number)))
    else:
        for action in receives:
            link.post(action, (16,), torch.float32)
        assert link.take(receives[0]).tolist() == [0.0] * 16
        _, tensor, copied = link._fetched[receives[1]]
        assert copied.result(60) is not None
        assert tensor.tolist() == [1.0] * 16
        link.take(receives[1])
    link.drain()
    return True


def pass_on_as(rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    growths, _ = pass_on("cuda")
    assert growths == 1


def stage_two() -> tuple[bool, int]:
    """Stage two tensors in one slot; returns whether they share it, and the growths."""
    dist.init_process_group("gloo")
    link = HostLink(dist.new_group(), torch.device("cpu"))
    link.pool.reserve({512: 1})
    slot, _ = link._stage((128,), torch.float32)
    link._copying.append((link._copies.now(), None, slot))
    return link._stage((128,), torch.float32)[0] is slot, link.pool.num_growths


@pytest.mark.gloo
def test_a_pool_without_a_free_slot_waits_for_a_copy_and_does_not_grow():
    assert run_distributed(stage_two, 1) == [(True, 1)]


@pytest.mark.gloo
def test_what_arrives_is_what_was_sent_and_no_slot_is_lost():
    found: list[Any] = run_distributed(pass_on, 2, "cpu")
    assert found == [(1, 7)] * 2  # one that waits, two that are copied, four that leave


@pytest.mark.gloo
def test_the_next_tensor_is_copied_to_the_device_ahead_of_its_use():
    assert run_distributed(take_first, 2) == [True, True]


@pytest.mark.gpu
def test_what_arrives_on_a_gpu_is_what_was_computed_before_it_was_sent():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Both ranks on one GPU. A process that is forked may not use CUDA.
    mp.start_processes(pass_on_as, (port,), nprocs=2, start_method="spawn")
