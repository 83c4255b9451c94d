"""How much memory the host still has, and how to get a piece of it that copies run fast from."""

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.verify import peak_on_host
from megatron.fold3d.runtime.device import numa_node
from megatron.fold3d.runtime.offload_library import PinnedMemory

_CGROUPS = Path("/sys/fs/cgroup")


class HostMemoryError(RuntimeError):
    """The host has less memory than is asked for."""


def take(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return ``num_bytes`` of host memory as one tensor, page-locked where ``device`` is a GPU.

    It is anonymous memory of this process: however the process ends, nothing of it stays behind.

    Raises:
        HostMemoryError: there is not as much.
    """
    check(num_bytes, "for offloaded activations")
    if device.type == "cuda":
        return PinnedMemory(num_bytes, numa_node(device)).tensor
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_DONTFORK)  # workers of data loaders have no use for it
    return torch.frombuffer(mapped, dtype=torch.uint8)


def check_node(plan: Plan, bytes_of_stage: int, ranks: Sequence[int]) -> None:
    """Return if a node has memory for the activations that a plan sends there.

    Args:
        plan: of all pipeline ranks.
        bytes_of_stage: what one micro-batch's forward of a stage saves, at least.
        ranks: the pipeline ranks that are on this node, each as often as it is.

    Raises:
        HostMemoryError: the node has less.
    """
    sizes = dict.fromkeys(range(plan.num_stages), bytes_of_stage)
    of_rank = {rank: peak_on_host(plan.programs[rank], sizes).total() for rank in set(ranks)}
    total = sum(of_rank[rank] for rank in ranks) * bytes_of_stage
    check(total, f"for the activations that {len(ranks)} ranks of this node offload")


def check(num_bytes: int, purpose: str, available: int | None = None) -> None:
    """Return if the host has ``num_bytes`` left.

    Raises:
        HostMemoryError: it has not.
    """
    available = available_bytes() if available is None else available
    if num_bytes > available:
        raise HostMemoryError(
            f"{num_bytes:,} bytes of host memory {purpose}, {available:,} are available; "
            "use fewer micro-batches, more recomputation, or --offload-activations off"
        )


def available_bytes() -> int:
    """Return what this process may still take: of the machine, and of its control group."""
    return min(_of_machine(), *_of_control_groups())


def _of_machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable; offload needs Linux 3.14 or later")


def _of_control_groups() -> Iterator[int]:
    """Yield what each control group (version 2) around this process leaves it."""
    yield 1 << 62
    paths = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.removeprefix("0::/") for line in paths if line.startswith("0::/")), None)
    if own is None:
        return
    for group in ((_CGROUPS / own), *(_CGROUPS / own).parents):
        limit, used = group / "memory.max", group / "memory.current"
        if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
            yield max(0, int(text) - int(used.read_text()) + _reclaimable(group))
        if group == _CGROUPS:
            return


def _reclaimable(group: Path) -> int:
    """Return the bytes of files that the kernel would drop first: `memory.current` counts them."""
    for line in (group / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
