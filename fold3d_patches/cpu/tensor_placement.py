"""Patch the functions that place a tensor on the GPU.

Why: Megatron allocates with ``device="cuda"``, moves batches and modules with ``.cuda()``, and
    asks ``tensor.type()`` for ``torch.cuda.FloatTensor`` when it clips and when it sorts
    parameters by precision.
Change: "cuda" means the CPU, ``.cuda()`` changes nothing, a type is spelled as on a GPU, and no
    tensor is page-locked, which would raise without a driver.
Remove when: Megatron allocates on the accelerator that torch names, and compares dtypes.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.utils._device import _device_constructors

from fold3d_patches.registry import Patch, around, replace

FACTORIES = ("empty", "empty_like", "ones", "rand", "tensor", "zeros")


def cpu_if_cuda(device: Any) -> Any:
    """The device to allocate on; an index, as everywhere in torch, means CUDA."""
    kind = device.type if isinstance(device, torch.device) else device
    is_cuda = isinstance(kind, int) or (isinstance(kind, str) and kind.startswith("cuda"))
    return "cpu" if is_cuda else device


@functools.cache  # torch.jit knows functions by their id, so ours must outlive the patch
def _on_cpu(upstream: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    _device_constructors()  # `with torch.device("meta")` looks factories up here: fill it first

    @functools.wraps(upstream)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = cpu_if_cuda(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return upstream(*args, **kwargs)

    _register_builtin(factory, _find_builtin(upstream))  # what a script that calls it compiles to
    return factory


def _stay(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    return self


@around("torch:Tensor.type")
def _type_as_on_gpu(
    upstream: Callable[..., Any], self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if dtype is None:
        return upstream(self).replace("torch.", "torch.cuda.")
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return upstream(self, dtype, *args, **kwargs)


@around(
    "megatron.core.dist_checkpointing.mapping:ShardedTensor.init_data",
    parameters="self device init_fn /",
)
def _init_data_on_cpu(
    upstream: Callable[..., None], self: Any, device: Any, init_fn: Any = torch.empty
) -> None:
    upstream(self, cpu_if_cuda(device), init_fn)


PATCHES = (
    *(Patch(target=f"torch:{name}", make=_on_cpu) for name in FACTORIES),
    replace("torch:Tensor.cuda", _stay),
    replace("torch.nn:Module.cuda", _stay),
    _type_as_on_gpu,
    _init_data_on_cpu,
)
