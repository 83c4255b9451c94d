"""``--hierarchical-dp-sync``: the flag, and the options that it excludes."""

import os
from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.argument_group import ArgumentGroup
from megatron.fold3d.config.gpu_settings import MOST_CONNECTIONS
from megatron.fold3d.config.refusals import Refusal, refused

_DROP = "drop one of the two"

REFUSALS = (
    Refusal(
        "--preemptive-comm",
        "preemptive_comm",
        "its scheduler starts slices in one group of ranks, and these are three",
        _DROP,
    ),
)


def add_hierarchical_flags(group: ArgumentGroup) -> None:
    """Add ``--hierarchical-dp-sync``."""
    group.add_argument(
        "--hierarchical-dp-sync",
        choices=("off", "auto"),
        default="off",
        help="auto: if the replicas of a model chunk share nodes and span several, sum their "
        "gradients inside each node first, then across nodes, in parts. A node then sends fewer "
        "bytes to others, and sums differ from Megatron's in the order of additions (default: "
        "off).",
    )


def hierarchical_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting ``--hierarchical-dp-sync`` cannot take."""
    if args.hierarchical_dp_sync == "off":
        return
    found = f"--hierarchical-dp-sync {args.hierarchical_dp_sync}"
    if schedule == "stock":
        yield (
            f"{found} with --schedule stock: only our executor leads reductions through nodes; "
            "drop it, or give --schedule aiao"
        )
        return
    yield from refused(REFUSALS, args, schedule, found)
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if args.device == "cuda" and connections != str(MOST_CONNECTIONS):
        has = f"={connections}" if connections else ", unset and so 8,"
        yield (
            f"CUDA_DEVICE_MAX_CONNECTIONS{has} with {found}: a sum across nodes waits for other "
            "ranks, and so would whatever shares its hardware queue; give "
            f"{MOST_CONNECTIONS}, and drop the flag where Megatron asserts 1: for tensor and "
            "context parallelism on GPUs before Blackwell"
        )
