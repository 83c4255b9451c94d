"""Patch what the layers of ``--transformer-impl local`` lack: norm, attention and experts.

Why: without Transformer Engine and NVIDIA apex Megatron normalizes with torch's modules, and
    refuses them under ``--sequence-parallel``. Multi-latent attention tells its core the widths of
    its keys and values, which only Transformer Engine's takes: Megatron's own computes with any,
    and then shapes its output as if values were as wide as ``--kv-channels``. And it refuses
    context parallelism. Before an all-to-all Megatron moves the experts' numbers of tokens to the
    host, and makes them what torch takes as split sizes on the way; a tensor that is on the host
    already stays a tensor, which torch refuses.
Change: with sequence parallelism the norm is torch's own all the same (so its results are torch's,
    bit for bit) and its parameters carry the mark by which Megatron sums their gradients over the
    tensor-parallel ranks. Attention takes the widths, and its output is as wide as the values are.
    With context parallelism each rank gathers the keys and values of the whole sequence, as
    ``--cp-comm-type all_gather`` does on a GPU, and computes with its own queries. Numbers of
    tokens on the host become an array as well.
Remove when: ``WrappedTorchNorm`` accepts sequence parallelism, ``DotProductAttention`` takes
    ``k_channels`` and ``v_channels`` and runs under ``--context-parallel-size``, and ``as_numpy``
    of ``maybe_move_tensor_to_cpu`` does not depend on where the tensor was.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fold3d_patches.registry import around

_ATTENTION = "megatron.core.transformer.dot_product_attention:DotProductAttention"
_TO_HOST = "maybe_move_tensor_to_cpu"


def _with(config: Any, **settings: Any) -> Any:
    """Return a copy of Megatron's configuration with other settings."""
    changed = copy.copy(config)
    vars(changed).update(settings)
    return changed


@around("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", parameters="cls config /")
def _allow_sequence_parallel(
    upstream: Callable[..., Any], cls: type, config: Any, *args: Any, **kwargs: Any
) -> Any:
    norm = upstream(cls, _with(config, sequence_parallel=False), *args, **kwargs)
    if config.sequence_parallel:
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
    return norm


@around(f"{_ATTENTION}.__init__", parameters="self config /")
def _take_widths(
    upstream: Callable[..., None],
    self: Any,
    config: Any,
    *args: Any,
    k_channels: int | None = None,
    v_channels: int | None = None,
    **kwargs: Any,
) -> None:
    upstream(self, _with(config, context_parallel_size=1), *args, **kwargs)
    self.config = config
    if v_channels is not None:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


@around(f"{_ATTENTION}.forward", parameters="self query key value attention_mask /")
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


@around(
    f"megatron.core.transformer.moe.moe_utils:{_TO_HOST}",
    rebinds=(f"megatron.core.transformer.moe.token_dispatcher:{_TO_HOST}",),
    parameters="tensor as_numpy record_stream /",
)
def _always_as_asked(
    upstream: Callable[..., Any], tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    moved = upstream(tensor, as_numpy, record_stream)
    return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved


PATCHES = (_allow_sequence_parallel, _take_widths, _gather_keys, _always_as_asked)
