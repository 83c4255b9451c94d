"""Stock Megatron on CPU and gloo, so that laptops and CI run the real thing."""

from importlib import import_module

from fold3d_patches.registry import Patch

_MODULES = (
    *("device", "rng", "tensor_placement", "compiler", "initialize"),
    *("all_gather", "data_loader", "local_layers", "optimizer_state"),
)


def patches() -> tuple[Patch, ...]:
    """Everything that ``--device cpu`` replaces."""
    modules = (import_module(f"{__name__}.{name}") for name in _MODULES)
    return tuple(patch for module in modules for patch in module.PATCHES)
