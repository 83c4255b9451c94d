"""What a paired group passes on."""

import pytest
import torch.distributed as dist

from megatron.fold3d.runtime.events import UNHEARD
from megatron.fold3d.runtime.tensor_parallel.paired_group import PairedGroup
from tests.distributed import run_distributed


def meet() -> int:
    dist.init_process_group("gloo")
    group = PairedGroup(dist.group.WORLD, lambda: None, UNHEARD, "TP.sync")
    dist.barrier(group=group)
    return group.size()


@pytest.mark.gloo
def test_ranks_meet_at_a_barrier() -> None:
    assert run_distributed(meet, 2) == [2, 2]
