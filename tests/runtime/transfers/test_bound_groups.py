"""A default group that is bound to a device is refused: its groups share one stream."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fold3d.runtime.transfers.p2p import P2P
from tests.distributed import run_distributed


def connect_with_a_bound_group() -> str:
    """Bind the default group, as ``init_process_group(device_id=...)`` does; return the refusal."""
    dist.init_process_group("gloo")
    world: Any = dist.GroupMember.WORLD
    world.bound_device_id = torch.device("cpu", 0)
    with pytest.raises(ValueError, match="device_id") as refused:
        P2P(world, torch.device("cpu"))
    return str(refused.value)


@pytest.mark.gloo
def test_a_bound_default_group_is_refused() -> None:
    (message,) = run_distributed(connect_with_a_bound_group, 1)
    assert message.startswith("init_process_group(device_id=cpu:0): ")
    assert message.endswith("; drop device_id")
