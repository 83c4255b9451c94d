"""Megatron's formulas for a GPT: parameters, FLOPs, training time, bytes that travel.

From Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (SC'21). Symbols: l layers, h hidden size, V vocabulary, s sequence length, B global
batch, b micro-batch, t tensor-parallel size.
"""

from math import sqrt

SECONDS_PER_DAY = 86_400


def pipeline_s(
    batch_per_replica: int,
    microbatch_size: int,
    num_ranks: int,
    forward_s: float,
    backward_s: float,
) -> float:
    """Return the time of a batch without communication (eq. 1): (b'/b + p - 1) (t_f + t_b)."""
    return (batch_per_replica / microbatch_size + num_ranks - 1) * (forward_s + backward_s)


def num_parameters(layers: int, hidden: int, vocabulary: int, sequence: int) -> float:
    """Return P (eq. 2): 12 l h² (1 + 13/(12 h) + (V + s)/(12 l h))."""
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + sequence) * hidden


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


def training_days(
    tokens: float, parameters: float, num_gpus: int, flops_per_s_per_gpu: float
) -> float:
    """Return the end-to-end time (eq. 4): 8 T P / (n X)."""
    return 8 * tokens * parameters / (num_gpus * flops_per_s_per_gpu) / SECONDS_PER_DAY


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


def best_num_checkpoints(layers: int, input_bytes: float, intermediate_bytes: float) -> float:
    """Return how many saved layer inputs take the least memory (Sec. 3.5): √(l A_int / A_in)."""
    return sqrt(layers * intermediate_bytes / input_bytes)
