"""Closed-form bubbles of GPipe, 1F1B, Megatron's interleaved 1F1B, zero bubble and Merak.

Each function returns the seconds that a rank idles in an iteration without communication.
``forward_s`` and ``backward_s`` are of one micro-batch on all of a rank's segments.
"""


def gpipe_s(num_ranks: int, forward_s: float, backward_s: float) -> float:
    """Return GPipe's bubble (Megatron Sec. 2.2.1): (p - 1) (t_f + t_b)."""
    return (num_ranks - 1) * (forward_s + backward_s)


def one_f_one_b_s(num_ranks: int, forward_s: float, backward_s: float) -> float:
    """Return 1F1B's bubble, GPipe's with less memory (Megatron Sec. 2.2.1)."""
    return gpipe_s(num_ranks, forward_s, backward_s)


def interleaved_s(num_ranks: int, num_segments: int, forward_s: float, backward_s: float) -> float:
    """Return the bubble with v segments per rank (Megatron Sec. 2.2.2): (p - 1) (t_f + t_b) / v."""
    return gpipe_s(num_ranks, forward_s, backward_s) / num_segments


def ratio(num_ranks: int, num_segments: int, num_microbatches: int) -> float:
    """Return bubble over compute (Megatron Sec. 2.2): (p - 1) / (v m)."""
    return (num_ranks - 1) / (num_segments * num_microbatches)


def zb_h1_s(num_ranks: int, forward_s: float, backward_s: float, weight_s: float) -> float:
    """Return ZB-H1's bubble (Qi et al., ICLR 2024, Table 2): (p - 1) (T_F + T_B - T_W).

    ``backward_s`` excludes the weight gradients, which take ``weight_s``. As in a transformer, that
    must be no longer than a forward or a backward; otherwise a rank idles longer.
    """
    return (num_ranks - 1) * (forward_s + backward_s - weight_s)


def zb_h2_s(num_ranks: int, forward_s: float, backward_s: float, weight_s: float) -> float:
    """Return ZB-H2's bubble (Qi et al., ICLR 2024, Table 2): (p - 1) (T_F + T_B - 2 T_W)."""
    return (num_ranks - 1) * (forward_s + backward_s - 2 * weight_s)


def merak_one_f_one_b_s(num_ranks: int, forward_s: float) -> float:
    """Return 1F1B's bubble with recomputation (Merak Sec. 5.1): 4 (s - 1) T.

    A backward takes 2 T and recomputes a forward first, which takes T again.
    """
    return 4 * (num_ranks - 1) * forward_s


def merak_early_recompute_s(num_ranks: int, forward_s: float) -> float:
    """Return the bubble when recomputation does not wait for the gradient (Merak Sec. 5.1)."""
    return 3 * (num_ranks - 1) * forward_s


def merak_shifted_critical_path_s(num_ranks: int, forward_s: float) -> float:
    """Return the bubble when the last rank is off the critical path (Merak Sec. 5.1)."""
    return 3 * (num_ranks - 2) * forward_s


def merak_iteration_s(bubble_s: float, num_microbatches: int, forward_s: float) -> float:
    """Return Merak's iteration: m forwards, recomputed forwards and backwards, and the bubble."""
    return 4 * num_microbatches * forward_s + bubble_s
