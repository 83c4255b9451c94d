"""Which runs reduce every segment in buckets, inside its last backward.

Stock Megatron cuts only the first model chunk of the first pipeline rank into buckets: its
schedules hide the others' DP.sync behind further backwards. With a plan, buckets can save time on
every segment and every rank.
"""

from argparse import Namespace


def cuts_every_segment(args: Namespace) -> bool:
    """Tell whether every rank cuts the segments of this run at ``--ddp-bucket-size``.

    The distributed optimizer keeps stock's buckets, since they decide its shards. A checkpoint of
    its default format loads only into the same buckets. The fully reshardable format of 0.19.2
    writes wrong values where there is padding between two buckets. And norms are summed shard by
    shard, so a clipped update would differ from stock's in the last digit.
    """
    return bool(args.overlap_grad_reduce and not args.use_distributed_optimizer)
