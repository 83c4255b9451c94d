"""Patch ``megatron.core.distributed.torch_fully_sharded_data_parallel.DeviceMesh``.

Why: Megatron's wrapper of torch's FSDP2 names its mesh "cuda", and FSDP2 then looks for a GPU.
Change: the mesh is one of CPUs. Which modules are sharded, and when they are gathered, stay
    Megatron's and torch's.
Remove when: Megatron names the device of its process group.
"""

from types import SimpleNamespace
from typing import Any

from fold3d_patches.registry import Patch


def patch() -> Patch:
    """Let ``--use-torch-fsdp2`` run on gloo."""

    def on_cpu(upstream: Any) -> Any:
        return SimpleNamespace(from_group=lambda group, _: upstream.from_group(group, "cpu"))

    wrapper = "megatron.core.distributed.torch_fully_sharded_data_parallel"
    return Patch(target=f"{wrapper}:DeviceMesh", make=on_cpu)
