"""What preemption needs of NCCL, as far as one GPU shows it. `make extension` comes first."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator, extension

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(extension() is None, reason="needs the extension: make extension"),
]

CUDA = torch.device("cuda", 0)
SECOND = 2_000_000_000  # of `_sleep`'s cycles, or a little more


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of one rank."""
    torch.cuda.set_device(CUDA)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_slices_end_while_what_was_issued_after_them_still_runs():
    communicator = PreemptiveCommunicator(slice_bytes=1 << 20, timeout=timedelta(seconds=60))
    communicator.connect([])
    group = communicator.group(dist.group.WORLD)
    gradient = torch.zeros(1 << 22, device=CUDA)
    with communicator:
        dist.all_reduce(gradient, group=group)  # NCCL connects at its first collective
        torch.cuda._sleep(SECOND // 10)
        gradient.fill_(1.0)
        dist.all_reduce(gradient, group=group, async_op=True)
        torch.cuda._sleep(2 * SECOND)  # is queued long before the gradient is complete
        behind = torch.cuda.Event()
        behind.record()
    assert not behind.query()  # the communicator has waited for its slices alone
    torch.cuda.synchronize()
    assert bool((gradient == 1.0).all())
