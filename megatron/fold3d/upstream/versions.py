"""What differs between the versions of Megatron-core that we run with; no other room asks for one.

The rest of our code is written for the newest, and takes from here what an older one has under
another name, in another form, or not at all. Each entry says until which version it is needed. An
entry can go when `MEGATRON` begins there. `upstream.pretrain` has what a schedule does not need.
"""

from typing import Any

MEGATRON = ">=0.17.1,<0.20"

_OLD_COLLECTIVES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


def is_before(version: str) -> bool:
    """Return True if the Megatron-core that is imported is older than a version as ``0.19``."""
    from megatron.core.package_info import MAJOR, MINOR

    return tuple(map(int, version.split("."))) > (MAJOR, MINOR)


def collective(name: str) -> str:
    """Return what this torch calls a method of process groups. Until torch 2.13.

    A method tells more than a version, since builds of 2.13.0a0 have either.
    """
    from torch.distributed import ProcessGroup

    return name if hasattr(ProcessGroup, "all_gather_single") else _OLD_COLLECTIVES.get(name, name)


def with_collectives(group: type[Any]) -> type[Any]:
    """Give a class of process groups this torch's names for its methods. Until torch 2.13."""
    for name in vars(group).keys() & _OLD_COLLECTIVES.keys():
        setattr(group, collective(name), vars(group)[name])
    return group


def copy_optimizer_param_metadata(destination: Any, source: Any) -> None:
    """Copy what an optimizer reads of a parameter. Until 0.19."""
    from megatron.core.optimizer import optimizer

    if not is_before("0.19"):
        optimizer.copy_optimizer_param_metadata(destination, source)
    elif hasattr(source, "shared"):
        destination.shared = source.shared


def last_linear_arguments() -> tuple[int, ...]:
    """Return what Megatron's linear function takes last: over how many ranks a weight is cut.

    Until 0.19.
    """
    return () if is_before("0.19") else (1,)


def pretrain_parses_flags() -> bool:
    """Return True if ``pretrain`` parses and validates the flags by itself. Until 0.18."""
    return is_before("0.18")


def sums_are_awaited_once() -> bool:
    """Return True if a second wait for a sum of gradients fails. Until 0.18."""
    return is_before("0.18")
