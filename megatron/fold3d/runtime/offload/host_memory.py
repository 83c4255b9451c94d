"""How much memory the host still has, and how to allocate page-locked memory for fast copies."""

import fcntl
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.memory import peak_on_host
from megatron.fold3d.runtime.device import numa_node
from megatron.fold3d.runtime.offload.offload_library import pinned_memory

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/meminfo")
_FIX = "use fewer micro-batches, more recomputation, or --offload-activations off"


# By version of control groups: their folder, the files of a group's limit and of what it uses, and
# a line of `memory.stat`: page cache that the kernel drops first, which is used too.
_VERSIONS = {
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
    2: ("", "memory.max", "memory.current", "inactive_file "),
}


class HostMemoryError(RuntimeError):
    """The host has less memory than is asked for."""


def take(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return ``num_bytes`` of host memory as one ``uint8`` tensor.

    The memory is page-locked if ``device`` is a GPU. It is anonymous memory of this process, so
    nothing stays behind however the process ends. All its pages are resident on return.

    Raises:
        HostMemoryError: the host has less.
    """
    with _turn():
        check(num_bytes, "for offloaded activations")
        if device.type == "cuda":
            try:
                return pinned_memory(num_bytes, numa_node(device))
            except OSError as error:
                raise HostMemoryError(f"{error}; {_FIX}") from None
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        mapped = mmap.mmap(-1, num_bytes, flags=flags)
        mapped.madvise(mmap.MADV_DONTFORK)  # workers of data loaders have no use for it
        return torch.frombuffer(mapped, dtype=torch.uint8)


@contextmanager
def _turn() -> Iterator[None]:
    """Make the ranks of a node check and allocate in turn, so no two count the same bytes."""
    with _MACHINE.open() as shared:
        fcntl.flock(shared, fcntl.LOCK_EX)  # held until the file is closed or the process ends
        yield


def check_node(plan: Plan, bytes_of_stage: int, ranks: Sequence[int]) -> None:
    """Check that a node has memory for the activations that a plan offloads there.

    Args:
        bytes_of_stage: lower limit of the bytes that one micro-batch's forward of a stage saves.
        ranks: the pipeline ranks of the processes on this node.

    Raises:
        HostMemoryError: the node has less.
    """
    sizes = dict.fromkeys(range(plan.num_stages), bytes_of_stage)
    of_rank = {rank: peak_on_host(plan.programs[rank], sizes).total() for rank in set(ranks)}
    total = sum(of_rank[rank] for rank in ranks) * bytes_of_stage
    check(total, f"for the activations that {len(ranks)} ranks of this node offload")


def check(num_bytes: int, purpose: str) -> None:
    """Check that the host has ``num_bytes`` left.

    Raises:
        HostMemoryError: it has less.
    """
    available = available_bytes()
    if num_bytes > available:
        raise HostMemoryError(
            f"{num_bytes:,} bytes of host memory {purpose}, {available:,} are available; {_FIX}"
        )


def available_bytes() -> int:
    """Return the bytes that this process can still take: by the machine and its control groups."""
    of_machine = _number_in(_MACHINE, "MemAvailable:")
    if of_machine is None:
        raise OSError(f"{_MACHINE} has no MemAvailable; offload needs Linux 3.14 or later")
    return min([of_machine * 1024, *_of_control_groups()])


def _of_control_groups() -> Iterator[int]:
    """Yield the bytes left in each control group of this process, of either version."""
    for line in _OWN_GROUPS.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _of_group(path, 2)
        elif "memory" in controllers.split(","):
            yield from _of_group(path, 1)


def _of_group(path: str, version: int) -> Iterator[int]:
    """Yield the bytes left in a group and in its parents; a container may see only the root."""
    home, limit_file, used_file, cache = _VERSIONS[version]
    root = _CGROUPS / home
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        limit, used = folder / limit_file, folder / used_file
        if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
            reclaimable = _number_in(folder / "memory.stat", cache) or 0
            yield max(0, int(text) - int(used.read_text()) + reclaimable)
        if folder == root:
            return


def _number_in(file: Path, name: str) -> int | None:
    """Return the number on the line of a file that begins with a name."""
    lines = file.read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), None)
