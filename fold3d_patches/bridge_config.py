"""Patch ``runtime_config_update`` of Megatron-Bridge, its counterpart, and its ``compile_helpers``.

Why: a script of Bridge's has no flags. Its configuration is complete only within ``pretrain``,
    which calls this function before it makes process groups. The last: see `compile_helpers`.
Change: the function calls ours, which installs the schedule that fits the configuration.
Remove when: ``ConfigContainer`` accepts a schedule.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from fold3d_patches import compile_helpers
from fold3d_patches.registry import Patch, around

_BRIDGE = "megatron.bridge.training"


def patches(updated: Callable[..., None]) -> Iterator[Patch]:
    """Yield the patches; ``updated`` takes Bridge's function and the configuration."""
    for update, module in (
        ("runtime_config_update", "pretrain"),
        ("megatron_mimo_runtime_config_update", "pretrain_megatron_mimo"),  # several modules
    ):
        rebinds = (f"{_BRIDGE}.{module}:{update}",)
        yield around(f"{_BRIDGE}.config:{update}", rebinds=rebinds, parameters="cfg /")(updated)
    yield replace(compile_helpers.unless_built, target=f"{_BRIDGE}.initialize:compile_helpers")
