"""What ``--offload-activations`` and ``--lazy-inter-segment`` cannot be combined with."""

from argparse import Namespace
from collections.abc import Iterator


def offloads_everything(args: Namespace) -> bool:
    """Tell whether all large saved tensors leave, or only what recomputation starts from.

    A hook of autograd's hands back a weight without the marks that Megatron's fused weight gradient
    looks for. With that kernel hooks stay away from weights, and so from most of a forward.
    """
    return args.offload_activations == "on" and not args.gradient_accumulation_fusion


def offload_problems(args: Namespace, schedule: str, num_segments: int) -> Iterator[str]:
    """Yield found, rule and fix of what is in the way of offloading."""
    if args.lazy_inter_segment and schedule == "stock":
        yield "--lazy-inter-segment with --schedule stock: it sends itself; give --schedule aiao"
    elif args.lazy_inter_segment and num_segments == 1:
        yield (
            "--lazy-inter-segment with one segment: nothing goes from the last rank to the first; "
            "drop it, or give --segments 2 or more"
        )
    if args.offload_activations == "off":
        return
    found = f"--offload-activations {args.offload_activations}"
    if schedule == "stock":
        yield (
            f"{found} with --schedule stock: the copies are actions of a plan; give --schedule aiao"
        )
    if args.distribute_saved_activations:
        yield (
            f"{found} with --distribute-saved-activations: it puts shards together in the tensors "
            "that they were cut from, which have left; use --sequence-parallel, which saves "
            "shards of its own"
        )
