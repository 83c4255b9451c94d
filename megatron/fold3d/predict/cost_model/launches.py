"""The number of collectives as which our runtime launches a stage's DP.sync.

Stock launches one per model chunk. So does our runtime where it cuts no buckets: with the
distributed optimizer, and where all streams of a GPU share one hardware queue.
"""

from collections.abc import Sequence
from math import ceil

from megatron.fold3d.policy.grad_sync_cuts import cuts_every_segment
from megatron.fold3d.predict.cost_model.sizes import Setup

SLICE_BYTES = 8 << 20
"""Training's default for GPUs (``slice-bytes=``)."""
_BUCKET = 40_000_000  # Megatron's default for --ddp-bucket-size, parameters
_BUCKET_PER_REPLICA = 1_000_000  # but at least


def launches(
    gradient_bytes: Sequence[float], setup: Setup, *, deferred: bool, connections: int
) -> tuple[int, ...]:
    """Return the number of launches of each stage.

    Args:
        deferred: whether DP.sync reaches into the next iteration, which cuts each bucket in slices.
    """
    cuts = cuts_every_segment(
        one_queue=connections == 1, distributed_optimizer=setup.distributed_optimizer
    )
    if setup.distributed_optimizer or not (cuts or deferred):
        return (1,) * len(gradient_bytes)
    most = setup.gradient_bytes * max(_BUCKET, _BUCKET_PER_REPLICA * setup.num_replicas)
    buckets = [max(1, ceil(count / most)) if cuts else 1 for count in gradient_bytes]
    if not deferred:
        return tuple(buckets)
    each = zip(gradient_bytes, buckets, strict=True)
    return tuple(n * max(1, ceil(count / n / SLICE_BYTES)) for count, n in each)
