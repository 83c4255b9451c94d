"""Times of ring collectives, and the bandwidth that a process group sees.

Equations 1 to 10 of Singh et al., "A 4D Hybrid Algorithm to Scale Parallel Training to Thousands
of GPUs" (AxoNN). ``n`` GPUs form a ring, latencies are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


def all_gather_s(n: int, shard_bytes: float, bytes_per_s: float) -> float:
    """Return t_AG (eq. 1): (G - 1) m / β, with m the part that each GPU has."""
    return (n - 1) * shard_bytes / bytes_per_s


def reduce_scatter_s(n: int, buffer_bytes: float, bytes_per_s: float) -> float:
    """Return t_RS (eq. 2): (G - 1)/G m / β, with m the whole buffer."""
    return (n - 1) / n * buffer_bytes / bytes_per_s


def all_reduce_s(n: int, buffer_bytes: float, bytes_per_s: float) -> float:
    """Return t_AR (eq. 3): 2 (G - 1)/G m / β, with m the whole buffer."""
    return 2 * reduce_scatter_s(n, buffer_bytes, bytes_per_s)


def group_bandwidths(
    sizes: Sequence[int], gpus_per_node: int, intra_bytes_per_s: float, inter_bytes_per_s: float
) -> tuple[float, ...]:
    """Return β for each level of nested process groups (eq. 10).

    A group that fits in a node uses the node's own links. A group that spans nodes shares the links
    between them with its neighbours' rings. A node has one such ring for each GPU of the groups
    inside, and at most one for each of its GPUs.

    Args:
        sizes: sizes of the groups, innermost first.
        gpus_per_node: GPUs that share the links between nodes.
        intra_bytes_per_s: bandwidth between two GPUs of a node.
        inter_bytes_per_s: bandwidth between two nodes.
    """
    return tuple(
        intra_bytes_per_s
        if prod(sizes[: i + 1]) <= gpus_per_node
        else inter_bytes_per_s / min(gpus_per_node, prod(sizes[:i]))
        for i in range(len(sizes))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer4D:
    """A fully connected layer of AxoNN: m rows times a k by n weight, on a grid of GPUs.

    A transposed layer swaps the roles, and the bandwidths, of x and y.
    """

    rows: float
    k: int
    n: int
    grid: tuple[int, int, int, int]
    """G_x (innermost), G_y, G_z, G_data."""
    bandwidths: tuple[float, float, float, float]
    element_bytes: int = 2
    transposed: bool = False

    def _axes(self) -> tuple[int, int, float, float]:
        (gx, gy, _, _), (bx, by, _, _) = self.grid, self.bandwidths
        return (gy, gx, by, bx) if self.transposed else (gx, gy, bx, by)

    def all_gather_z_s(self) -> float:
        """Return the gather of the weights (eq. 4)."""
        gx, gy, gz, _ = self.grid
        shard = self.element_bytes * self.k * self.n / (gx * gy * gz)
        return all_gather_s(gz, shard, self.bandwidths[2])

    def reduce_scatter_z_s(self) -> float:
        """Return the scatter of the weight gradients (eq. 5)."""
        gx, gy, gz, _ = self.grid
        buffer = self.element_bytes * self.k * self.n / (gx * gy)
        return reduce_scatter_s(gz, buffer, self.bandwidths[2])

    def all_reduce_y_s(self) -> float:
        """Return the sum of the outputs in forward (eq. 6)."""
        gx, gy, _, by = self._axes()
        return all_reduce_s(gy, self.element_bytes * self.rows * self.n / (self.grid[2] * gx), by)

    def all_reduce_x_s(self) -> float:
        """Return the sum of the input gradients in backward (eq. 7)."""
        gx, gy, bx, _ = self._axes()
        return all_reduce_s(gx, self.element_bytes * self.rows * self.k / (self.grid[2] * gy), bx)

    def all_reduce_data_s(self) -> float:
        """Return DP.sync (eq. 8)."""
        *inner, data = self.grid
        buffer = self.element_bytes * self.k * self.n / prod(inner)
        return all_reduce_s(data, buffer, self.bandwidths[3])

    def total_s(self) -> float:
        """Return all of them (eq. 9)."""
        return (
            self.all_gather_z_s()
            + self.reduce_scatter_z_s()
            + self.all_reduce_y_s()
            + self.all_reduce_x_s()
            + self.all_reduce_data_s()
        )
