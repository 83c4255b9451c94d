"""Closed forms of the papers to which tests hold plans, simulator and model shapes.

A bubble is the seconds that a rank idles in an iteration without communication. ``forward_s`` and
``backward_s`` are of one micro-batch on all of a rank's segments. Megatron is Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC'21), with l
layers, hidden size h, vocabulary V, sequence length s and global batch B. AxoNN is Singh et al.,
"A 4D Hybrid Algorithm to Scale Parallel Training to Thousands of GPUs".
"""

from dataclasses import dataclass
from math import prod

from megatron.fold3d.predict.cost_model.ring_times import (
    all_gather_s,
    all_reduce_s,
    reduce_scatter_s,
)


def one_f_one_b_s(num_ranks: int, forward_s: float, backward_s: float) -> float:
    """Return 1F1B's bubble, and GPipe's (Megatron Sec. 2.2.1): (p - 1) (t_f + t_b)."""
    return (num_ranks - 1) * (forward_s + backward_s)


def zb_h1_s(num_ranks: int, forward_s: float, backward_s: float, weight_s: float) -> float:
    """Return ZB-H1's bubble (Qi et al., ICLR 2024, Table 2): (p - 1) (T_F + T_B - T_W).

    ``backward_s`` excludes the weight gradients, which take ``weight_s``. As in a transformer, that
    must be no longer than a forward or a backward; otherwise a rank idles longer.
    """
    return (num_ranks - 1) * (forward_s + backward_s - weight_s)


def zb_h2_s(num_ranks: int, forward_s: float, backward_s: float, weight_s: float) -> float:
    """Return ZB-H2's bubble (Qi et al., ICLR 2024, Table 2): (p - 1) (T_F + T_B - 2 T_W)."""
    return (num_ranks - 1) * (forward_s + backward_s - 2 * weight_s)


def flops_per_iteration(
    batch: int,
    layers: int,
    hidden: int,
    vocabulary: int,
    sequence: int,
    *,
    recompute: bool = True,
) -> float:
    """Return F (eq. 3): 96 B s l h² (1 + s/(6 h) + V/(16 l h)).

    Without recomputation 72 instead of 96: a forward and a backward of twice that. The logits
    are not recomputed in either case.
    """
    passes = 4 if recompute else 3
    layer_flops = 24 * batch * sequence * hidden**2 + 4 * batch * sequence**2 * hidden
    return passes * layers * layer_flops + 6 * batch * sequence * hidden * vocabulary


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
