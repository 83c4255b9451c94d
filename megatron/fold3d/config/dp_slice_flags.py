"""``slices=``: whether the plan starts DP.sync in slices, one before each computation."""

from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.bucket_flags import has_one_queue


def slices_dp_sync(args: Namespace) -> bool:
    """Tell whether the plan of a run has slices of DP.sync.

    Unless the word says, it has with ``step=next`` where CUDA_DEVICE_MAX_CONNECTIONS=1:
    collectives that are launched in a row would block computation there.
    """
    if args.dp_slices != "auto":
        return bool(args.dp_slices == "on")
    deferred = args.backward_share is not None
    return bool(deferred and not args.preemptive_comm and has_one_queue(args))


def dp_slice_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting ``slices=on`` cannot run with."""
    if args.dp_slices != "on":
        return
    if schedule == "stock":
        yield (
            "slices=on with --schedule stock: only a plan has slices of DP.sync; drop it, or give "
            "--schedule aiao"
        )
        return
    if not args.overlap_grad_reduce:
        yield (
            "slices=on without --overlap-grad-reduce: Megatron then reduces all gradients at the "
            "end of the iteration; add --overlap-grad-reduce"
        )
    if args.preemptive_comm:
        yield (
            "--preemptive-comm with slices=on: its scheduler decides when slices start; "
            "drop one of the two"
        )
