"""Patch ``megatron.core.transformer.dot_product_attention.DotProductAttention``.

Why: multi-latent attention tells its core the widths of its keys and values, which only
    Transformer Engine's takes. Megatron's own computes with any, and then shapes its output as if
    values were as wide as ``--kv-channels``. And it refuses context parallelism.
Change: the widths are taken, and the output is as wide as the values are. With context
    parallelism each rank gathers the keys and values of the whole sequence, as
    ``--cp-comm-type all_gather`` does on a GPU, and computes with its own queries.
Remove when: ``DotProductAttention`` takes ``k_channels`` and ``v_channels``, and runs under
    ``--context-parallel-size``.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fold3d_patches.registry import Patch, around

_TARGET = "megatron.core.transformer.dot_product_attention:DotProductAttention"


def _take_widths(
    upstream: Callable[..., None],
    self: Any,
    config: Any,
    *args: Any,
    k_channels: int | None = None,
    v_channels: int | None = None,
    **kwargs: Any,
) -> None:
    whole = config
    if config.context_parallel_size > 1:
        whole = copy.copy(config)
        whole.context_parallel_size = 1
    upstream(self, whole, *args, **kwargs)
    self.config = config
    if v_channels is not None:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def _gather_keys(
    upstream: Callable[..., Tensor],
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    num_ranks = self.config.context_parallel_size
    if num_ranks == 1:
        return upstream(self, query, key, value, attention_mask, *args, **kwargs)

    from megatron.core.parallel_state import get_context_parallel_group
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    group = get_context_parallel_group()
    places = _places(query.size(0), num_ranks)
    in_order = places.argsort()
    key, value = (
        gather_from_sequence_parallel_region(part, group=group).index_select(0, in_order)
        for part in (key, value)
    )
    if attention_mask is None:
        mine = places.view(num_ranks, -1)[group.rank()]
        attention_mask = (torch.arange(len(places)) > mine[:, None])[None, None]
    return upstream(self, query, key, value, attention_mask, *args, **kwargs)


def _places(length: int, num_ranks: int) -> Tensor:
    """Return the place in the sequence of each token that the ranks hold, rank by rank.

    Megatron cuts a sequence into two parts for each rank. A rank holds one from the front and, of
    the same rank counted from the end, one from the back.
    """
    parts = torch.arange(length * num_ranks).view(2 * num_ranks, -1)
    return torch.cat(
        [parts[part] for rank in range(num_ranks) for part in (rank, 2 * num_ranks - 1 - rank)]
    )


def patches() -> tuple[Patch, ...]:
    """The attention that ``--transformer-impl local`` uses."""
    return (
        around(
            f"{_TARGET}.__init__",
            _take_widths,
            parameters="self config layer_number attn_mask_type attention_type attention_dropout "
            "softmax_scale cp_comm_type pg_collection",
        ),
        around(
            f"{_TARGET}.forward",
            _gather_keys,
            parameters="self query key value attention_mask attn_mask_type attention_bias "
            "packed_seq_params",
        ),
    )
