"""Patch ``megatron.training.utils.get_device_arch_version``.

Why: for tensor or context parallelism before Blackwell Megatron asserts one hardware queue. It is
    a matter of speed: with FSDP and with overlapped experts Megatron warns instead.
Change: to Megatron, which asks only while it validates flags, the GPUs are Blackwell, for which it
    demands no number of queues. The environment stays as it is, so CUDA reads the user's number.
Remove when: Megatron warns about more than one queue.
"""

from fold3d_patches.registry import replace
from megatron.fold3d.config.gpu_settings import BLACKWELL

_NAME = "get_device_arch_version"

PATCHES = (
    replace(
        f"megatron.training.utils:{_NAME}",
        lambda: BLACKWELL,
        rebinds=(
            f"megatron.training.utils.common_utils:{_NAME}",
            f"megatron.training.arguments:{_NAME}",
        ),
    ),
)
