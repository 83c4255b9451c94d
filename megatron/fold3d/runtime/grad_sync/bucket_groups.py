"""The bucket groups of model chunks, and process groups of our own."""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import create_group

from megatron.fold3d.runtime.agreement import gathered

Ranks = tuple[int, ...]


def bucket_groups(*chunks: Any) -> Iterator[Any]:
    """Yield the bucket groups of Megatron's DDP, including bucket groups of experts.

    A chunk that is not trained, as with ``--skip-train``, is not wrapped in DDP and has none.
    """
    for chunk in chunks:
        yield from getattr(chunk, "bucket_groups", ())
        yield from getattr(chunk, "expert_parallel_bucket_groups", ())


def first_layer_first(chunk: Any) -> Iterator[Any]:
    """Yield a chunk's bucket groups in the order in which its forward needs their parameters."""
    yield from reversed(tuple(bucket_groups(chunk)))


def start_gathers(chunk: Any) -> None:
    """Start the all-gathers of a chunk's parameters that have not started, first layers first."""
    for bucket_group in first_layer_first(chunk):
        if not bucket_group.param_gather_dispatched:
            bucket_group.start_param_sync()


def group_of(bucket_group: Any) -> dist.ProcessGroup:
    """Return the process group of a bucket group's reductions and, if sharded, its all-gathers."""
    group: dist.ProcessGroup = getattr(bucket_group, _group_name(bucket_group))
    return group


def set_group(bucket_group: Any, group: dist.ProcessGroup) -> None:
    """Make ``group`` the process group of a bucket group's collectives from now on."""
    setattr(bucket_group, _group_name(bucket_group), group)


def is_sharded(bucket_group: Any) -> bool:
    """Tell whether each replica updates a shard of the parameters: the distributed optimizer."""
    return bool(bucket_group.ddp_config.use_distributed_optimizer)


def _group_name(bucket_group: Any) -> str:
    sharded = is_sharded(bucket_group)
    return "intra_distributed_optimizer_instance_group" if sharded else "data_parallel_group"


def ranks_of(group: dist.ProcessGroup) -> Ranks:
    """Return the global ranks of a process group."""
    return tuple(dist.get_process_group_ranks(group))


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the current timeout of a process group: Megatron may change it in training."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    backend: Any = group._get_backend(torch.device(device))
    timeout: timedelta = backend.options._timeout
    return timeout


def everyones_groups(ours: AbstractSet[Ranks]) -> list[Ranks]:
    """Return the union of all ranks' ``ours``, sorted, so that every rank has the same order.

    All ranks of the job call this together.
    """
    return sorted(set().union(*gathered(ours)))


def make_groups(
    beside: Iterable[dist.ProcessGroup], backend: str | None = None, *, first: bool = False
) -> dict[Ranks, dist.ProcessGroup]:
    """Make a new process group over the ranks of each of Megatron's groups ``beside``.

    All ranks of the job call this together, each with the groups that it is in. The new groups have
    the timeout of Megatron's groups, also after ``--distributed-timeout-seconds-after-init``. Over
    NCCL they have Megatron's options too: the traffic class, and the group's entry in the file of
    ``--nccl-communicator-config-path``. **No GPU has run this.**

    Args:
        beside: Megatron's groups for the same kind of communication.
        backend: the backend of the groups; None is the job's.
        first: whether NCCL's kernels run on a high-priority stream even if Megatron's do not.
    """
    megatrons = {ranks_of(group): group for group in beside}
    is_nccl = (backend or dist.get_backend()) == "nccl"
    made = {}
    for ranks in everyones_groups(set(megatrons)):
        options: Any = None
        timeout = timeout_of(megatrons[ranks]) if ranks in megatrons else None
        if is_nccl and ranks in megatrons:
            theirs: Any = megatrons[ranks]._get_backend(torch.device("cuda")).options
            is_first = first or theirs.is_high_priority_stream
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_first)
            options.config, options._timeout = theirs.config, timeout
        group = create_group(ranks, timeout, backend, options)
        if dist.get_rank() in ranks:
            made[ranks] = group
    return made


def connect(
    beside: Iterable[dist.ProcessGroup], device: torch.device
) -> dict[Ranks, dist.ProcessGroup]:
    """Make new groups as `make_groups` does, and let the ranks of each connect over NCCL."""
    made = make_groups(beside)
    for group in made.values():
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return made
