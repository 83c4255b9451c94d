"""Settings of NCCL and CUDA that would hang a run, or contradict a flag."""

import os
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator

from megatron.fold3d.config.gpu_settings import TOO_FEW_CONNECTIONS, has_many_queues

_CLASS_OF_ALL = ("NCCL_IB_SL", "NCCL_IB_TC")
_CLASSES = range(256)
_FLAG = "--traffic-class"


def traffic_classes(text: str) -> dict[str, int]:
    """Read the value of ``--traffic-class``: a class for ``pp``, for ``dp`` or for both."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    classes = {name: number for name, _, number in pairs}
    if len(classes) < len(pairs) or not (
        classes.keys() <= {"pp", "dp"} and all(map(str.isdecimal, classes.values()))
    ):
        raise ArgumentTypeError(f"{text!r}: a class is a number for pp, dp or both; give pp=N,dp=N")
    return {name: int(number) for name, number in classes.items()}


def launch_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting that may hang ``--preemptive-comm``.

    One thread starts what is ready while another runs ahead on the compute stream, and every rank's
    gate has its own timing. So what makes the device keep the order of launches can deadlock ranks.
    """
    if args.device != "cuda" or not args.preemptive_comm:
        return
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections is not None and not has_many_queues():
        yield f"CUDA_DEVICE_MAX_CONNECTIONS={connections} {TOO_FEW_CONNECTIONS}"
    if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1":
        yield (
            "NCCL_LAUNCH_ORDER_IMPLICIT=1 with --preemptive-comm: groups would have to start their "
            "operations in one order on all ranks, and a gate delays those of one rank; unset it"
        )


def traffic_class_problems(args: Namespace) -> Iterator[str]:
    """Yield the problems of ``--traffic-class``."""
    classes: dict[str, int] = args.traffic_class
    if not classes:
        return
    found = f"{_FLAG} {','.join(f'{name}={value}' for name, value in classes.items())}"
    if unknown := [value for value in classes.values() if value not in _CLASSES]:
        yield (
            f"{found}: {unknown[0]} is no class, which is a number from {_CLASSES[0]} to "
            f"{_CLASSES[-1]}; on InfiniBand the service level, 0 to 15, on RoCE four times the DSCP"
        )
    if args.device == "cpu":
        yield (
            f"{found} with --device cpu: gloo does not mark its packets; drop the flag, or train "
            "on GPUs"
        )
    for name in _CLASS_OF_ALL if args.device == "cuda" else ():
        if (value := os.environ.get(name)) is not None:
            yield (
                f"{name}={value} with {found}: it sets the class of all of NCCL's connections and "
                "wins; drop one of the two"
            )
