"""Settings of NCCL and CUDA that would hang a run, or contradict a flag."""

import os
from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.argument_group import ArgumentGroup

# With --preemptive-comm one thread starts what is ready while another runs ahead on the compute
# stream, and every rank's gate has its own timing. So a setting that makes the device keep the
# order of launches can deadlock ranks.
_UNSAFE = {
    "NCCL_LAUNCH_ORDER_IMPLICIT": (
        "groups would have to start their operations in one order on all ranks, and a gate delays "
        "those of one rank",
        "unset it",
    ),
}
_CLASS_OF_ALL = ("NCCL_IB_SL", "NCCL_IB_TC")
_CLASSES = range(256)


def add_traffic_class_flags(group: ArgumentGroup) -> None:
    """Add the flags that mark NCCL's packets with traffic classes."""
    for groups in ("pp", "dp"):
        group.add_argument(
            f"--{groups}-traffic-class",
            type=int,
            metavar="N",
            help=f"Mark the packets of {groups.upper()}.sync over NCCL, so that switches and cards "
            "can put PP.sync first: on InfiniBand a service level, on RoCE four times a DSCP.",
        )


def launch_problems() -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting that may hang ``--preemptive-comm``."""
    from megatron.fold3d.config.gpu_settings import connection_problems

    yield from connection_problems()
    for name, (rule, fix) in _UNSAFE.items():
        if os.environ.get(name) == "1":
            yield f"{name}=1 with --preemptive-comm: {rule}; {fix}"


def traffic_class_problems(args: Namespace) -> Iterator[str]:
    """Yield the problems of ``--pp-traffic-class`` and ``--dp-traffic-class``."""
    given = {
        "--pp-traffic-class": args.pp_traffic_class,
        "--dp-traffic-class": args.dp_traffic_class,
    }
    flags = {flag: value for flag, value in given.items() if value is not None}
    for flag, value in flags.items():
        if value not in _CLASSES:
            yield (
                f"{flag} {value}: a class is a number from {_CLASSES[0]} to {_CLASSES[-1]}; on "
                "InfiniBand the service level, 0 to 15, on RoCE four times the DSCP"
            )
    if flags and args.device == "cpu":
        yield (
            f"{' and '.join(flags)} with --device cpu: gloo does not mark its packets; "
            "drop the flag, or train on GPUs"
        )
    for name in _CLASS_OF_ALL if flags and args.device == "cuda" else ():
        if (value := os.environ.get(name)) is not None:
            yield (
                f"{name}={value} with {' and '.join(flags)}: it sets the class of all of NCCL's "
                "connections and wins; drop one of the two"
            )
