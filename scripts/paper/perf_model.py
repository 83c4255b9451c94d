"""Equations 1 to 7 of the FOLD3D paper (Sec. III-C), one function each.

A closed form to check the simulator with. Equation 4, from which ``--segments auto`` derives the
paper's choice, is `megatron.fold3d.policy.num_segments.overlapping_s`.
Symbols of the paper are named in each docstring; its s in equations 4 and 5 is ns, its r here is a
bandwidth.
"""


def serialized_s(compute_s: float, communication_s: float, bubble_s: float) -> float:
    """Return an iteration in which nothing overlaps (eq. 1): T_comp + T_comm + T_bubble."""
    return compute_s + communication_s + bubble_s


def overlapped_s(
    compute_s: float, overlapping_s: float, exposed_s: float, bubble_s: float
) -> float:
    """Return FOLD3D's iteration (eq. 2): max(T_comp, T_ol) + T_nol + T_bubble."""
    return max(compute_s, overlapping_s) + exposed_s + bubble_s


def bubble_s(compute_s: float, num_ranks: int, num_segments: int, num_microbatches: int) -> float:
    """Return the bubble of a looped schedule (eq. 3): (p - 1) T_comp / (ns ms)."""
    return (num_ranks - 1) * compute_s / (num_segments * num_microbatches)


def grad_sync_s(host_parameter_bytes: float, num_hosts: int, bytes_per_s: float) -> float:
    """Return T_dp of a ring all-reduce (Sec. III-C): 2 (d_inter - 1) w / (d_inter r).

    Args:
        host_parameter_bytes: w, of all GPUs of a host together.
        num_hosts: d_inter, the hosts of a data-parallel group.
        bytes_per_s: r, the bandwidth of a host.
    """
    return 2 * (num_hosts - 1) * host_parameter_bytes / (num_hosts * bytes_per_s)


def p2p_s(num_tensors: int, activation_bytes: float, bytes_per_s: float) -> float:
    """Return T_pp: bs tensors of a bytes each over a host's link.

    The paper divides by d_inter as well and gives no reason; a pipeline's transfers do not get
    fewer when it is replicated, so this does not.
    """
    return num_tensors * activation_bytes / bytes_per_s


def exposed_s(
    p2p_s: float,
    grad_sync_s: float,
    tensor_parallel_s: float,
    num_segments: int,
    num_microbatches: int,
) -> float:
    """Return T_nol (eq. 5): T_pp/ms + T_dp/ns + T_tp."""
    return p2p_s / num_microbatches + grad_sync_s / num_segments + tensor_parallel_s


def interleaved_activation_bytes(
    num_ranks: int, num_segments: int, activation_bytes: float
) -> float:
    """Return the saved activations of Megatron's first rank (eq. 6): (p (ns + 1) - 1) of them."""
    return (num_ranks * (num_segments + 1) - 1) * activation_bytes


def aiao_activation_bytes(
    num_segments: int, num_microbatches: int, activation_bytes: float
) -> float:
    """Return the saved activations of AIAO (eq. 7): ms ns of them, on the device or on the host."""
    return num_microbatches * num_segments * activation_bytes
