"""What ``--offload-activations`` cannot be combined with."""

from argparse import Namespace
from collections.abc import Iterator


def offload_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield found, rule and fix of what is in the way of offloading."""
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
