"""What the ranks of a job tell each other; all of them call these functions in the same order."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the element-wise maximum of ``values`` over all ranks of the job."""
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found.tolist()]


def gathered[T](mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return ``mine`` of each rank of the job, or of a group, by rank."""
    everyones = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group)
    return everyones
