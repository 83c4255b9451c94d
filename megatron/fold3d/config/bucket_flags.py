"""The rules which runs reduce segments in buckets or slices, and where DP.sync starts.

Stock Megatron cuts only the first model chunk of the first pipeline rank into buckets: stock's
schedules hide the DP.sync of other chunks behind further backwards. With a plan, buckets can save
time for every segment and rank, except where all streams of a GPU share one hardware queue.
"""

import os
from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.schedule_flags import parts_of, spelled_parts, word_of
from megatron.fold3d.config.settings import asked
from megatron.fold3d.plan.choice import file_of
from megatron.fold3d.plan.schedule_word import AUTO, STOCK
from megatron.fold3d.plan.schedules import SPLIT_SCHEDULES
from megatron.fold3d.policy import grad_sync_cuts

_ELSEWHERE = (AUTO, STOCK, *SPLIT_SCHEDULES)  # orders that place weight gradients themselves
_NOT_EARLY = (
    *("--deterministic-mode", "--num-distributed-optimizer-instances above 1"),
    *("--shard-segments", "--ddp-reduce-scatter-with-fp32-accumulation"),
    *("--preemptive-comm", "pairs=on"),
)


def has_one_queue(args: Namespace) -> bool:
    """Tell whether all streams of a GPU share one hardware queue.

    Megatron demands one queue for tensor or context parallelism on GPUs before Blackwell. A command
    that predicts a run sets the number in the namespace, in place of the environment.
    """
    here = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    connections = getattr(args, "cuda_device_max_connections", here)
    return bool(args.device == "cuda" and connections == "1")


def reduces_early(args: Namespace) -> bool:
    """Return True if DP.sync may start between delayed weight gradients.

    With one hardware queue it may not, since its slices could block computation. With more than two
    replicas, a slice of an all-reduce may be summed in another order than the whole.
    """
    gathers = args.overlap_param_gather or not args.use_distributed_optimizer
    return bool(args.overlap_grad_reduce and gathers and not any(delays_dp_sync(args)))


def delays_dp_sync(args: Namespace) -> Iterator[str]:
    """Yield the settings, as the user spells them, that keep DP.sync from starting early."""
    if has_one_queue(args):
        yield "CUDA_DEVICE_MAX_CONNECTIONS=1"
    yield from filter(None, (asked(args, setting) for setting in _NOT_EARLY))


def slices_dp_sync(args: Namespace) -> bool:
    """Tell whether the plan starts DP.sync in slices, one before each computation.

    By default it does with ``step=next`` and CUDA_DEVICE_MAX_CONNECTIONS=1, since collectives that
    are launched in a row would block computation in the one queue.
    """
    if parts_of(args, "slices", "off"):
        return False
    defers = parts_of(args, "step") and not args.preemptive_comm
    return bool(parts_of(args, "slices", "on") or (defers and has_one_queue(args)))


def cuts_every_segment(args: Namespace) -> bool:
    """Return True if every rank cuts the segments of this run at ``--ddp-bucket-size``.

    With one hardware queue segments are not cut, because buckets would block computation. The
    distributed optimizer keeps stock's buckets, since buckets decide its shards. A checkpoint in
    the default format loads only into the same buckets. The fully reshardable format of 0.19.2
    writes wrong values if there is padding between two buckets. And norms are summed shard by
    shard, so a clipped update would differ from stock's in the last digit.
    """
    return bool(args.overlap_grad_reduce) and grad_sync_cuts.cuts_every_segment(
        one_queue=has_one_queue(args), distributed_optimizer=args.use_distributed_optimizer
    )


def place_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting that excludes ``wgrad=behind``."""
    found, sharded = spelled_parts(args, "wgrad", "behind"), args.use_distributed_optimizer
    schedule = word_of(args).order
    if not found or file_of(schedule) or schedule in _ELSEWHERE:
        return
    if parts_of(args, "step") and sharded:
        yield (
            f"{found} with step=next and --use-distributed-optimizer: what is deferred is cut "
            "shard by shard, not parameter by parameter; give last, or drop one of the others"
        )
    elif not args.overlap_grad_reduce:
        yield (
            f"{found} without --overlap-grad-reduce: Megatron then reduces all gradients at the "
            "end of the iteration; add --overlap-grad-reduce, or give last"
        )
    elif sharded and not args.overlap_param_gather:
        yield (
            f"{found} with --use-distributed-optimizer: it needs a plan that gathers parameters; "
            "add --overlap-param-gather"
        )
    elif other := next(delays_dp_sync(args), None):
        yield (
            f"{found} with {other}: DP.sync then starts where that says, not as soon as gradients "
            "are complete; give last, or drop the other"
        )
