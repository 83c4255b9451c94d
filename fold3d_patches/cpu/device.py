"""Patch what ``torch.cuda`` says about the device, and its streams and events.

Why: Megatron asks ``torch.cuda`` where to allocate, how many devices there are and how old they
    are; without a driver most of these questions raise. Its DDP, timers and schedules order their
    work with streams and events.
Change: there is one device and it is the CPU. ``is_available`` stays honest (False), so that
    torch and Megatron take their own CPU branches. The capability is Blackwell's: from there on
    Megatron does not ask for the environment variable CUDA_DEVICE_MAX_CONNECTIONS. A CPU runs its
    work in the order of issue, so every wait is over when it begins; torch has such streams for
    the CPU. Events keep the host's clock, so that elapsed times stay true.
Remove when: Megatron asks ``torch.accelerator`` instead of ``torch.cuda``.
"""

import time
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from fold3d_patches.registry import Patch, replace


class HostEvent(torch.cpu.Event):
    """A moment on the host's clock; nothing is ever pending."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end_event: "HostEvent") -> float:
        return (end_event._recorded_s - self._recorded_s) * 1e3  # CUDA counts milliseconds


class HostStream(torch.cpu.Stream):
    """The order of issue, under a name."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def record_event(self, event: HostEvent | None = None) -> HostEvent:  # type: ignore[override]
        event = event or HostEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass


def _answers(module: str, answers: dict[str, Any]) -> tuple[Patch, ...]:
    """Make functions of a module answer with these values whatever they are asked."""

    def answer(value: Any) -> Any:
        return lambda *_, **__: value

    return tuple(replace(f"{module}:{name}", answer(value)) for name, value in answers.items())


def absent_gpu(is_blackwell: bool, *, has_engine: bool = False) -> tuple[Patch, ...]:
    """Return the answers that Megatron's validation needs about GPUs that this node lacks.

    Args:
        is_blackwell: whether the GPUs are Blackwell; otherwise they are Hopper.
        has_engine: whether their nodes have Transformer Engine, with its rotary embeddings.
    """
    kernels = {"fused_apply_rotary_pos_emb": None} if has_engine else {}
    return (
        *_answers("torch.cuda", _of_generation("absent", 10 if is_blackwell else 9)),
        *_answers("megatron.core.models.common.embeddings.rope_utils", kernels),
    )


def _of_generation(name: str, major: int) -> dict[str, Any]:
    return {
        "get_device_capability": (major, 0),
        "get_device_properties": SimpleNamespace(name=name, major=major),
    }


_STREAM = HostStream()

PATCHES = (
    *_answers(
        "torch.cuda",
        {
            "is_available": False,
            "device_count": 1,
            "current_device": torch.device("cpu"),
            "set_device": None,
            "get_device_name": "cpu",
            "memory_stats": Counter[str](),
            "reset_peak_memory_stats": None,
            "set_stream": None,
            "current_stream": _STREAM,
            "default_stream": _STREAM,
            "synchronize": None,
            "is_current_stream_capturing": False,
            **_of_generation("cpu", 10),
        },
    ),
    *_answers("torch.cuda.nvtx", {"range_push": None, "range_pop": None}),
    replace("torch.cuda:Stream", HostStream),
    replace("torch.cuda:Event", HostEvent),
    replace("torch.cuda:stream", nullcontext),
)
