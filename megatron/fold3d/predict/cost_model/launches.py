"""The number of collectives that our runtime launches for a stage's DP.sync.

Stock launches one per model chunk. Our runtime launches one per bucket, or per slice of deferred
DP.sync. It cuts no more buckets than stock with the distributed optimizer, or with one hardware
queue for all streams of a GPU.
"""

from collections.abc import Sequence
from math import ceil

from megatron.fold3d.policy.grad_sync_cuts import cuts_every_segment
from megatron.fold3d.predict.cost_model.sizes import Setup

SLICE_BYTES = 8 << 20
"""Training's default for GPUs (``slice-bytes=``)."""
_BUCKET = 40_000_000  # Megatron's default for --ddp-bucket-size, parameters
_BUCKET_PER_REPLICA = 1_000_000  # parameters; a bucket has at least this many for each replica


def launches(
    gradient_bytes: Sequence[float], setup: Setup, *, deferred: bool, connections: int
) -> tuple[int, ...]:
    """Return the number of launches of each stage.

    Args:
        deferred: whether DP.sync reaches into the next iteration, so that it is cut into slices.
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
