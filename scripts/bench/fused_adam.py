"""Patch ``torch.optim.AdamW.__init__``: one pass over memory, as on GPUs.

Why: on GPUs Megatron steps with Apex's or Transformer Engine's fused Adam, in well under 1% of an
    iteration. On a CPU it takes torch's loop over tensors, several times slower, which counts
    against whoever steps all parameters and for whoever steps a shard of them.
Change: ``fused=True`` wherever the caller does not say. The same for all variants.
Remove when: Megatron asks for it itself, or every rank of the bench has an accelerator.
"""

from collections.abc import Callable
from typing import Any

from fold3d_patches.registry import Patch, around


def patch() -> Patch:
    """Fuse where nobody says otherwise."""

    def init(upstream: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **{"fused": True} | kwargs)

    return around("torch.optim:AdamW.__init__")(init)
