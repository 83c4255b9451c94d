"""Patch ``megatron.core.transformer.dot_product_attention.DotProductAttention.__init__``.

Why: multi-latent attention tells its core the widths of its keys and values, which only
    Transformer Engine's takes. Megatron's own computes with any, and then shapes its output as if
    values were as wide as ``--kv-channels``.
Change: the widths are taken, and the output is as wide as the values are.
Remove when: ``DotProductAttention`` takes ``k_channels`` and ``v_channels``.
"""

from collections.abc import Callable
from typing import Any

from fold3d_patches.registry import Patch


def _take_widths(upstream: Callable[..., None]) -> Callable[..., None]:
    def take(
        self: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        upstream(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return take


def patch() -> Patch:
    """The attention that ``--transformer-impl local`` uses."""
    return Patch(
        target="megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
        parameters=(
            *("self", "config", "layer_number", "attn_mask_type", "attention_type"),
            *("attention_dropout", "softmax_scale", "cp_comm_type", "pg_collection"),
        ),
        make=_take_widths,
    )
