"""What cannot work with ``--preemptive-comm``."""

from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.nccl_settings import launch_problems


def preemption_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield found, rule and fix of all that is in the way of ``--preemptive-comm``."""
    if not args.preemptive_comm:
        return
    if schedule == "stock":
        yield (
            "--preemptive-comm with --schedule stock: it schedules the transfers of a plan; "
            "give --schedule aiao, or drop it"
        )
    if (instances := args.num_distributed_optimizer_instances) > 1:
        yield (
            f"--num-distributed-optimizer-instances {instances} with --preemptive-comm: sums over "
            "the instances are not sliced; drop one of the two"
        )
    if args.ddp_reduce_scatter_with_fp32_accumulation:
        yield (
            "--ddp-reduce-scatter-with-fp32-accumulation with --preemptive-comm: its all-to-alls "
            "are not sliced; drop one of the two"
        )
    if args.device == "cuda":
        yield from launch_problems()
