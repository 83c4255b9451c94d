"""Patch what ``torch.cuda`` says about the device.

Why: Megatron asks ``torch.cuda`` where to allocate, how many devices there are and how old they
    are; without a driver most of these questions raise.
Change: there is one device and it is the CPU. ``is_available`` stays honest (False), so that
    torch and Megatron take their own CPU branches. The capability is Blackwell's: from there on
    Megatron does not ask for the environment variable CUDA_DEVICE_MAX_CONNECTIONS.
Remove when: Megatron asks ``torch.accelerator`` instead of ``torch.cuda``.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from fold3d_patches.registry import Patch, replace

CPU = torch.device("cpu")
CAPABILITY = (10, 0)


def _answer(name: str, value: Any, module: str = "torch.cuda") -> Patch:
    """Make the function ``name`` answer with a value whatever it is asked."""
    return replace(f"{module}:{name}", lambda *_, **__: value)


def absent_gpu(is_blackwell: bool) -> tuple[Patch, ...]:
    """Return the answers that Megatron's validation needs about GPUs that this node lacks.

    Args:
        is_blackwell: whether the GPUs are Blackwell; otherwise they are Hopper.
    """
    major = 10 if is_blackwell else 9
    return (
        _answer("get_device_capability", (major, 0)),
        _answer("get_device_properties", SimpleNamespace(name="absent", major=major)),
    )


def patches() -> tuple[Patch, ...]:
    """Every question that a training run asks about its device."""
    return (
        _answer("is_available", False),
        _answer("device_count", 1),
        _answer("current_device", CPU),
        _answer("set_device", None),
        _answer("get_device_name", "cpu"),
        _answer("get_device_capability", CAPABILITY),
        _answer("get_device_properties", SimpleNamespace(name="cpu", major=CAPABILITY[0])),
        _answer("memory_stats", Counter()),
        _answer("reset_peak_memory_stats", None),
        _answer("range_push", None, module="torch.cuda.nvtx"),
        _answer("range_pop", None, module="torch.cuda.nvtx"),
    )
