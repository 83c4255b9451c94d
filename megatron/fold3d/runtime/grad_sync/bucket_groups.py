"""The bucket groups of model chunks, and our own process groups over the same ranks."""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.runtime.transfers import nccl

Ranks = tuple[int, ...]


def bucket_groups(*chunks: Any) -> Iterator[Any]:
    """Yield the bucket groups of Megatron's DDP, including those of experts.

    A chunk that is not trained, as with ``--skip-train``, is not wrapped in DDP and has none.
    """
    for chunk in chunks:
        yield from getattr(chunk, "bucket_groups", ())
        yield from getattr(chunk, "expert_parallel_bucket_groups", ())


def first_layer_first(chunk: Any) -> Iterator[Any]:
    """Yield a chunk's bucket groups in the order in which its forward needs their parameters."""
    yield from reversed(tuple(bucket_groups(chunk)))


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


def own_part(bucket_group: Any, bucket: Any, parameter: Any) -> slice:
    """Return which elements of a parameter are in this replica's shard of its bucket."""
    group = group_of(bucket_group)
    size = bucket.grad_data.numel() // group.size()
    begin, end = bucket.param_to_index[parameter]
    first = group.rank() * size
    return slice(max(0, first - begin), max(0, min(end, first + size) - begin))


def _group_name(bucket_group: Any) -> str:
    sharded = is_sharded(bucket_group)
    return "intra_distributed_optimizer_instance_group" if sharded else "data_parallel_group"


def ranks_of(group: dist.ProcessGroup) -> Ranks:
    """Return the global ranks of a process group."""
    return tuple(dist.get_process_group_ranks(group))


def everyones_groups(ours: AbstractSet[Ranks]) -> list[Ranks]:
    """Return the union of all ranks' ``ours``, sorted, so that every rank has the same order.

    All ranks of the job call this together.
    """
    of_rank: list[set[Ranks]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_rank, ours)
    return sorted(set().union(*of_rank))


def connect(
    beside: Iterable[dist.ProcessGroup], device: torch.device, timeout: timedelta
) -> dict[Ranks, dist.ProcessGroup]:
    """Make a new process group over the ranks of each of Megatron's groups ``beside``.

    All ranks of the job call this together, each with the groups that it is in.
    """
    megatrons = {ranks_of(group): group for group in beside}
    made = {}
    for ranks in everyones_groups(set(megatrons)):
        options = None
        if ranks in megatrons:
            options = nccl.options(dist.get_backend(), megatrons[ranks], timeout)
        group = dist.new_group(ranks, timeout=timeout, pg_options=options)
        if dist.get_rank() in ranks:
            made[ranks] = group
            dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL connects here
    return made
