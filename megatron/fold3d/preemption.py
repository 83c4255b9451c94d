"""What cannot work with ``--preemptive-comm``."""

from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.nccl_settings import launch_problems


def preemption_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield found, rule and fix of all that is in the way of ``--preemptive-comm``."""
    if not args.preemptive_comm:
        return
    if schedule == "stock":
        yield (
            "--preemptive-comm with --schedule stock: it schedules the transfers of a plan; "
            "give --schedule aiao, or drop it"
        )
    if args.use_distributed_optimizer:
        yield (
            "--use-distributed-optimizer with --preemptive-comm: all-reduces are sliced, "
            "reduce-scatters and all-gathers are not yet; drop one of the two"
        )
    if args.device == "cuda":
        yield from launch_problems()
