"""Which runs reduce every segment in buckets, inside its last backward.

Stock Megatron cuts only the first model chunk of the first pipeline rank: its schedules hide the
others' DP.sync behind further backwards. With a plan, what a bucket gains on any segment and any
rank counts.
"""

from argparse import Namespace


def cuts_every_segment(args: Namespace) -> bool:
    """Tell whether the segments of this run are cut at ``--ddp-bucket-size``, on every rank.

    The distributed optimizer keeps stock's cut, since its shards move with the buckets: a
    checkpoint of its default format loads only where the cut is the same; the fully reshardable
    format of 0.19.2 writes wrong values where padding stands between two buckets; and norms are
    summed shard by shard, so that a clipped update would differ from stock's in the last digit.
    """
    return bool(args.overlap_grad_reduce and not args.use_distributed_optimizer)
