"""The parameters whose gradients Megatron changes after they are reduced over the replicas.

``finalize_model_grads`` sums some gradients over pipeline or tensor-parallel ranks at the end of
the iteration. They have to be reduced by then, even if the rest of their model chunk is deferred.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config


def reduced_in_iteration(
    chunks: Sequence[Any], groups: ProcessGroupCollection
) -> frozenset[torch.nn.Parameter]:
    """Return the parameters of a rank's chunks whose gradients must be reduced in the iteration."""
    kept: set[torch.nn.Parameter] = set()
    for chunk in chunks:
        kept.update(_copies_of_word_embeddings(chunk, groups.embd))
        kept.update(_summed_over_tensor_parallel(chunk, groups.tp))
    return frozenset(kept)


def _copies_of_word_embeddings(
    chunk: Any, embedding_group: dist.ProcessGroup | None
) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters that Megatron 0.19.2's ``_allreduce_word_embedding_grads`` reduces."""
    if embedding_group is None or embedding_group.size() == 1:
        return
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    if (model.pre_process or model.post_process) and model.share_embeddings_and_output_weights:
        yield model.shared_embedding_or_output_weight()


def _summed_over_tensor_parallel(
    chunk: Any, tensor_parallel_group: dist.ProcessGroup
) -> Iterator[torch.nn.Parameter]:
    """Yield those that Megatron 0.19.2's ``_allreduce_non_tensor_model_parallel_grads`` reduces."""
    if tensor_parallel_group.size() == 1:
        return
    config = get_model_config(chunk)
    for name, parameter in chunk.named_parameters():
        if (
            getattr(parameter, "average_gradients_across_tp_domain", False)
            or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
            or (config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name))
        ):
            yield parameter
