"""Bytes that travel for a GPT.

From Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (SC'21). Symbols: h hidden size, s sequence length, b micro-batch, t tensor-parallel
size.
"""


def p2p_bytes(
    microbatch_size: int, sequence: int, hidden: int, *, scatter: int = 1, element_bytes: int = 2
) -> float:
    """Return what one GPU sends to the next rank: b s h elements, or 1/t of them (Sec. 4.1)."""
    return microbatch_size * sequence * hidden * element_bytes / scatter


def tensor_parallel_elements(
    microbatch_size: int, sequence: int, hidden: int, tensor_parallel: int
) -> float:
    """Return what a GPU sends per layer and micro-batch (Sec. 3.2): 8 b s h (t - 1)/t."""
    share = (tensor_parallel - 1) / tensor_parallel
    return 8 * microbatch_size * sequence * hidden * share
