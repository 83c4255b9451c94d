"""Settings of NCCL and CUDA that would hang a run, or contradict a flag."""

import os
from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.argument_group import ArgumentGroup
from megatron.fold3d.config.gpu_settings import TOO_FEW_CONNECTIONS, has_many_queues

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
    """Yield one message (found, rule, fix) per setting that may hang ``--preemptive-comm``.

    One thread starts what is ready while another runs ahead on the compute stream, and every rank's
    gate has its own timing. So what makes the device keep the order of launches can deadlock ranks.
    """
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections is not None and not has_many_queues():
        yield f"CUDA_DEVICE_MAX_CONNECTIONS={connections} {TOO_FEW_CONNECTIONS}"
    if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1":
        yield (
            "NCCL_LAUNCH_ORDER_IMPLICIT=1 with --preemptive-comm: groups would have to start their "
            "operations in one order on all ranks, and a gate delays those of one rank; unset it"
        )


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
