"""Which runs reduce every segment in buckets, inside its last backward.

Stock Megatron cuts only the first model chunk of the first pipeline rank into buckets: its
schedules hide the others' DP.sync behind further backwards. With a plan, buckets can save time on
every segment and every rank, except where one hardware queue holds all streams of a GPU.
"""

import os
from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.policy import gradient_cut


def has_one_queue(args: Namespace) -> bool:
    """Tell whether all streams of a GPU share one hardware queue.

    Megatron demands that for tensor or context parallelism on GPUs before Blackwell.
    """
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return bool(args.device == "cuda" and connections == "1")


def reduces_early(args: Namespace) -> bool:
    """Return True if DP.sync may start between delayed weight gradients.

    With one hardware queue its slices would have to be placed where they block nothing. A slice of
    an all-reduce over more than two replicas may be summed in another order than the whole.
    """
    may_gather = gathers_by_plan(args) or not args.use_distributed_optimizer
    return bool(args.overlap_grad_reduce and may_gather and not any(delays_dp_sync(args)))


def gathers_by_plan(args: Namespace) -> bool:
    """Return True if actions of the plan gather the parameters of a distributed optimizer."""
    return bool(args.overlap_param_gather and args.align_param_gather)


def delays_dp_sync(args: Namespace) -> Iterator[str]:
    """Yield the settings, as they are spelled, with which no DP.sync starts early."""
    settings = {
        "CUDA_DEVICE_MAX_CONNECTIONS=1": has_one_queue(args),
        "--deterministic-mode": getattr(args, "deterministic_mode", False),
        f"--num-distributed-optimizer-instances {args.num_distributed_optimizer_instances}": (
            args.num_distributed_optimizer_instances != 1
        ),
        f"--shard-segments {args.shard_segments}": args.shard_segments != "off",
        "--ddp-reduce-scatter-with-fp32-accumulation": (
            args.ddp_reduce_scatter_with_fp32_accumulation
        ),
        "--preemptive-comm": args.preemptive_comm,
        "pairs=on": args.overlap_tensor_parallel,
    }
    return (spelled for spelled, is_set in settings.items() if is_set)


def cuts_every_segment(args: Namespace) -> bool:
    """Return True if every rank cuts the segments of this run at ``--ddp-bucket-size``.

    With one hardware queue they are not cut, because buckets would block computation. The
    distributed optimizer keeps stock's buckets, since they decide its shards. A checkpoint of its
    default format loads only into the same buckets. The fully reshardable format of 0.19.2 writes
    wrong values if there is padding between two buckets. And norms are summed shard by shard, so a
    clipped update would differ from stock's in the last digit.
    """
    return bool(args.overlap_grad_reduce) and gradient_cut.cuts_every_segment(
        one_queue=has_one_queue(args), distributed_optimizer=args.use_distributed_optimizer
    )
