"""Patch ``runtime_config_update`` of Megatron-Bridge, and its counterpart for several modules.

Why: a script of Bridge's has no flags. Its configuration is complete only within ``pretrain``,
    which calls this function before it makes process groups.
Change: the function calls ours, which installs the schedule that fits the configuration.
Remove when: ``ConfigContainer`` accepts a schedule.
"""

from collections.abc import Callable, Iterator

from fold3d_patches.registry import Patch, around


def patches(updated: Callable[..., None]) -> Iterator[Patch]:
    """Yield the patches; ``updated`` takes Bridge's function and the configuration."""
    for update in ("runtime_config_update", "megatron_mimo_runtime_config_update"):
        yield around(f"megatron.bridge.training.config:{update}", parameters="cfg /")(updated)
