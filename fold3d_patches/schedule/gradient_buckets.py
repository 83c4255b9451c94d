"""Patch where Megatron decides into how many buckets a model chunk's gradients are cut.

Why: only the first chunk of the first pipeline rank has buckets. Stock's schedules hide the others'
    DP.sync behind further backwards, and both of these places leave the bucket size out for them.
Change: every chunk is cut at ``--ddp-bucket-size``, on every rank, so that a segment's gradients
    travel while its last backward still runs (paper Algorithm 2, lines 4-10).
Remove when: Megatron lets the caller choose which chunks have buckets.
"""

from collections.abc import Callable
from typing import Any

from fold3d_patches.registry import around

Func = Callable[..., Any]


@around(
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    parameters="self / disable_bucketing",
)
def _with_bucket_groups(
    upstream: Func, self: Any, *args: Any, disable_bucketing: bool = False, **kwargs: Any
) -> None:
    upstream(self, *args, **kwargs)


@around(
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__",
    parameters="self ddp_config param_dtype grad_dtype params_with_names data_parallel_group "
    "bucket_size /",
)
def _cut(upstream: Func, self: Any, ddp_config: Any, *args: Any, **kwargs: Any) -> None:
    before, _bucket_size, *after = args[:4], *args[4:]
    upstream(self, ddp_config, *before, ddp_config.bucket_size, *after, **kwargs)


PATCHES = (_with_bucket_groups, _cut)
