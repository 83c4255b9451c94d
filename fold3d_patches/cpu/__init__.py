"""Stock Megatron on CPU and gloo, so that laptops and CI run the real thing."""

from fold3d_patches.registry import Patch


def patches() -> tuple[Patch, ...]:
    """Everything that ``--device cpu`` replaces."""
    from fold3d_patches.cpu import (
        all_gather,
        attention,
        compiler,
        data_loader,
        device_queries,
        initialize,
        layer_norm,
        optimizer_state,
        rng,
        streams,
        tensor_placement,
    )

    return (
        *device_queries.patches(),
        *streams.patches(),
        *rng.patches(),
        *tensor_placement.patches(),
        *compiler.patches(),
        initialize.patch(),
        all_gather.patch(),
        data_loader.patch(),
        layer_norm.patch(),
        attention.patch(),
        *optimizer_state.patches(),
    )
