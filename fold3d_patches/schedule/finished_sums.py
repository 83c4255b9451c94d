"""Patch how ``_ParamAndGradBucketGroup`` waits for the sum of its gradients.

Why: before 0.18 a group does not know that it was waited for, and ``finalize_model_grads`` fails
    when it waits again. A plan waits for a segment's sum before it takes the segment's step.
Change: as from 0.18 on, a second wait in one iteration does nothing.
Remove when: Megatron-core 0.17 is no longer supported.
"""

from collections.abc import Callable
from typing import Any

from fold3d_patches.registry import around

Func = Callable[..., Any]

_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"


def _begin(upstream: Func, self: Any, *args: Any, **kwargs: Any) -> None:
    upstream(self, *args, **kwargs)
    self.grad_reduce_finished = False


@around(f"{_BUCKETS}.finish_grad_sync", parameters="self / force_all_reduce")
def _finish_once(upstream: Func, self: Any, *args: Any, **kwargs: Any) -> None:
    overlaps = self.ddp_config.overlap_grad_reduce
    if overlaps and self.grad_reduce_finished:
        self.param_gather_dispatched = False
        return
    upstream(self, *args, **kwargs)
    self.grad_reduce_finished = overlaps


PATCHES = (
    *(around(f"{_BUCKETS}.{name}", parameters="self /")(_begin) for name in ("__init__", "reset")),
    _finish_once,
)
