"""Patch how Megatron's DDP sums gradients to shards.

Why: the distributed optimizer reduce-scatters whole gradients, although most of their exponents are
    near each other.
Change: with ``--coded-grad-reduce`` they are sent in fewer bits, and added up on arrival.
Remove when: Megatron's DDP takes the function that sums to shards as an argument.
"""

from fold3d_patches.registry import Patch, around
from megatron.fold3d.runtime.grad_sync.coded_sums import CodedSums

_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"


def patches(sums: CodedSums) -> tuple[Patch, ...]:
    """Return the patches of the collective, and of the start of those of a bucket group."""
    return (
        around(
            f"{_BUFFERS}:dist_reduce_scatter_func", parameters="output input / op group async_op"
        )(sums.reduce_scatter),
        around(
            f"{_BUFFERS}:_ParamAndGradBucketGroup.start_grad_sync",
            parameters="self / force_all_reduce",
        )(sums.start),
    )
