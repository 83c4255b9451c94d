"""The parameters whose gradients Megatron changes after they are reduced over the replicas.

``finalize_model_grads`` sums some gradients over pipeline or tensor-parallel ranks at the end of
the iteration. They have to be reduced by then, even if the rest of their model chunk is deferred.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config


def reduced_in_iteration(
    chunks: Sequence[Any], groups: ProcessGroupCollection
) -> frozenset[torch.nn.Parameter]:
    """Return the parameters of a rank's chunks whose gradients must be reduced in the iteration."""
    return frozenset(parameter for chunk in chunks for parameter in _of_chunk(chunk, groups))


def _of_chunk(chunk: Any, groups: ProcessGroupCollection) -> Iterator[torch.nn.Parameter]:
    """Yield what two functions of Megatron 0.19.2 reduce: word embeddings, and norms with TP."""
    config = get_model_config(chunk)
    for name, parameter in chunk.named_parameters():
        if getattr(parameter, "shared_embedding", False) or (  # _allreduce_word_embedding_grads
            groups.tp.size() > 1  # _allreduce_non_tensor_model_parallel_grads
            and (
                getattr(parameter, "average_gradients_across_tp_domain", False)
                or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
                or (config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name))
            )
        ):
            yield parameter
