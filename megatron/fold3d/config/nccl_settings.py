"""Settings of NCCL and CUDA that would hang a run, or contradict a flag."""

import os
from argparse import Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.fold3d.config.argument_group import ArgumentGroup
from megatron.fold3d.config.gpu_settings import TOO_FEW_CONNECTIONS, has_many_queues

_CLASS_OF_ALL = ("NCCL_IB_SL", "NCCL_IB_TC")
_CLASSES = range(256)
_FLAG = "--traffic-class"


def add_traffic_class_flags(group: ArgumentGroup) -> None:
    """Add the flag that marks NCCL's packets with traffic classes."""
    group.set_defaults(pp_traffic_class=None, dp_traffic_class=None)
    group.add_argument(
        _FLAG,
        action=_ReadClasses,
        metavar="pp=N,dp=N",
        help="Mark the packets of PP.sync, of DP.sync or of both over NCCL, so that switches and "
        "cards can put PP.sync first: on InfiniBand a service level, on RoCE four times a DSCP.",
    )


class _ReadClasses(Action):
    """Sets ``pp_traffic_class`` and ``dp_traffic_class`` from ``pp=N,dp=N``."""

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Read the classes; the last of several flags counts."""
        pairs = [pair.partition("=") for pair in str(values).split(",")]
        classes = {name: number for name, _, number in pairs}
        if len(classes) < len(pairs) or not (
            classes.keys() <= {"pp", "dp"} and all(map(str.isdecimal, classes.values()))
        ):
            raise ArgumentError(
                self, f"{values!r}: a class is a number for pp, dp or both; give pp=N,dp=N"
            )
        for name in ("pp", "dp"):
            given = classes.get(name)
            setattr(namespace, f"{name}_traffic_class", None if given is None else int(given))


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
    """Yield the problems of ``--traffic-class``."""
    given = {"pp": args.pp_traffic_class, "dp": args.dp_traffic_class}
    classes = {name: value for name, value in given.items() if value is not None}
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
