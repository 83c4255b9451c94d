"""Closed forms of the papers to which tests hold plans, simulator and model shapes.

A bubble is the seconds that a rank idles in an iteration without communication. ``forward_s`` and
``backward_s`` are of one micro-batch on all of a rank's segments. Megatron is Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC'21), with l
layers, hidden size h, vocabulary V, sequence length s and global batch B.
"""


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
