"""``slices=``: whether the plan starts DP.sync in slices, one before each computation."""

from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.bucket_flags import has_one_queue
from megatron.fold3d.config.refusals import spelled

_UNFIT = {
    "preemptive_comm": "its scheduler decides when slices start",
    "ddp_param_name_patterns_for_fp32_local_accumulation": (
        "gradients are copied back when Megatron's own buckets are reduced"
    ),
}


def slices_dp_sync(args: Namespace) -> bool:
    """Tell whether the plan of a run has slices of DP.sync.

    Unless the word says, it has with ``step=next`` where CUDA_DEVICE_MAX_CONNECTIONS=1:
    collectives that are launched in a row would block computation there.
    """
    if args.dp_slices != "auto":
        return bool(args.dp_slices == "on")
    fits = not any(getattr(args, name) for name in _UNFIT)
    return bool(fits and args.backward_share is not None and has_one_queue(args))


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
    for name, rule in _UNFIT.items():
        if value := getattr(args, name):
            flag = "--" + name.replace("_", "-")
            yield f"{spelled(flag, value)} with slices=on: {rule}; drop one of the two"
