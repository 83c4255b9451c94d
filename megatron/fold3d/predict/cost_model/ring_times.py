"""Times of ring collectives, and the bandwidth that a process group sees.

Equations 1 to 3 and 10 of Singh et al., "A 4D Hybrid Algorithm to Scale Parallel Training to
Thousands of GPUs" (AxoNN). ``n`` GPUs form a ring; latencies are left out.
"""

from collections.abc import Sequence
from math import prod


def all_gather_s(n: int, shard_bytes: float, bytes_per_s: float) -> float:
    """Return t_AG in seconds (eq. 1): (G - 1) m / β, with m the bytes of one GPU's shard."""
    return (n - 1) * shard_bytes / bytes_per_s


def reduce_scatter_s(n: int, buffer_bytes: float, bytes_per_s: float) -> float:
    """Return t_RS in seconds (eq. 2): (G - 1)/G m / β, with m the bytes of the whole buffer."""
    return (n - 1) / n * buffer_bytes / bytes_per_s


def all_reduce_s(n: int, buffer_bytes: float, bytes_per_s: float) -> float:
    """Return t_AR in seconds (eq. 3): 2 (G - 1)/G m / β, with m the bytes of the whole buffer."""
    return 2 * reduce_scatter_s(n, buffer_bytes, bytes_per_s)


def group_bandwidths(
    sizes: Sequence[int], gpus_per_node: int, intra_bytes_per_s: float, inter_bytes_per_s: float
) -> tuple[float, ...]:
    """Return β in bytes a second for each level of nested process groups (eq. 10).

    A group that fits in a node uses the node's own links. A group that spans nodes shares the links
    between nodes with its neighbours' rings. As many such rings pass a node as the inner groups
    together have GPUs, and at most one for each GPU of the node.

    Args:
        sizes: numbers of GPUs of the groups, innermost first.
    """
    return tuple(
        intra_bytes_per_s
        if prod(sizes[: i + 1]) <= gpus_per_node
        else inter_bytes_per_s / min(gpus_per_node, prod(sizes[:i]))
        for i in range(len(sizes))
    )
