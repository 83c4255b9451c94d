"""Which runs reduce every segment in buckets or slices, and where their DP.sync starts.

Stock Megatron cuts only the first model chunk of the first pipeline rank into buckets: its
schedules hide the others' DP.sync behind further backwards. With a plan, buckets can save time on
every segment and every rank, except where one hardware queue holds all streams of a GPU.
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

_ELSEWHERE = (AUTO, STOCK, *SPLIT_SCHEDULES)  # where weight gradients are is not the word's
_NOT_EARLY = (
    *("--deterministic-mode", "--num-distributed-optimizer-instances above 1"),
    *("--shard-segments", "--ddp-reduce-scatter-with-fp32-accumulation"),
    *("--preemptive-comm", "pairs=on"),
)


def has_one_queue(args: Namespace) -> bool:
    """Tell whether all streams of a GPU share one hardware queue.

    Megatron demands that for tensor or context parallelism on GPUs before Blackwell. A command
    that predicts a run elsewhere says so in the namespace, in place of the environment.
    """
    here = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    connections = getattr(args, "cuda_device_max_connections", here)
    return bool(args.device == "cuda" and connections == "1")


def reduces_early(args: Namespace) -> bool:
    """Return True if DP.sync may start between delayed weight gradients.

    With one hardware queue its slices would have to be placed where they block nothing. A slice of
    an all-reduce over more than two replicas may be summed in another order than the whole.
    """
    may_gather = gathers_by_plan(args) or not args.use_distributed_optimizer
    return bool(args.overlap_grad_reduce and may_gather and not any(delays_dp_sync(args)))


def gathers_by_plan(args: Namespace) -> bool:
    """Return True if actions of the plan gather the parameters of a distributed optimizer.

    DDP's hooks then only wait: `launch.install` lets Megatron align all-gathers, with one segment
    too, since hooks that are not aligned start the next bucket's.
    """
    return bool(args.overlap_param_gather)


def delays_dp_sync(args: Namespace) -> Iterator[str]:
    """Yield the settings, as they are spelled, with which no DP.sync starts early."""
    if has_one_queue(args):
        yield "CUDA_DEVICE_MAX_CONNECTIONS=1"
    yield from filter(None, (asked(args, setting) for setting in _NOT_EARLY))


def slices_dp_sync(args: Namespace) -> bool:
    """Tell whether the plan starts DP.sync in slices, one before each computation.

    Unless the word says, it does with ``step=next`` where CUDA_DEVICE_MAX_CONNECTIONS=1:
    collectives that are launched in a row would block computation there.
    """
    if parts_of(args, "slices", "off"):
        return False
    defers = parts_of(args, "step") and not args.preemptive_comm
    return bool(parts_of(args, "slices", "on") or (defers and has_one_queue(args)))


def cuts_every_segment(args: Namespace) -> bool:
    """Return True if every rank cuts the segments of this run at ``--ddp-bucket-size``.

    With one hardware queue they are not cut, because buckets would block computation. The
    distributed optimizer keeps stock's buckets, since they decide its shards. A checkpoint of its
    default format loads only into the same buckets. The fully reshardable format of 0.19.2 writes
    wrong values if there is padding between two buckets. And norms are summed shard by shard, so a
    clipped update would differ from stock's in the last digit.
    """
    return bool(args.overlap_grad_reduce) and grad_sync_cuts.cuts_every_segment(
        one_queue=has_one_queue(args), distributed_optimizer=args.use_distributed_optimizer
    )


def place_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting that `wgrad=behind` cannot run with."""
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
    elif sharded and not gathers_by_plan(args):
        yield (
            f"{found} with --use-distributed-optimizer: it needs a plan that gathers parameters; "
            "add --overlap-param-gather"
        )
    elif other := next(delays_dp_sync(args), None):
        yield (
            f"{found} with {other}: DP.sync then starts where that says, not as soon as gradients "
            "are complete; give last, or drop the other"
        )
