"""Patch ``megatron.core.transformer.transformer_layer.TransformerLayer.__init__``.

Why: on CPU a layer's first weights depend on which layers its rank built before, so two splits of
    one model into ranks and chunks start from different weights and their losses differ.
Change: a layer draws its weights from a stream of its own, seeded by its number in the model.
Remove when: Megatron's CPU initialization does not depend on the split.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from fold3d_patches.registry import Patch, around


def patch() -> Patch:
    """Make all variants of a comparison train the same model."""

    def init(
        upstream: Callable[..., None],
        self: Any,
        config: Any,
        submodules: Any,
        layer_number: int = 1,
        *args: Any,
        vp_stage: int | None = None,
        **kwargs: Any,
    ) -> None:
        rank = mpu.get_pipeline_model_parallel_rank()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(layer_number + get_transformer_layer_offset(config, vp_stage, rank))
            upstream(self, config, submodules, layer_number, *args, vp_stage=vp_stage, **kwargs)

    return around(
        "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
        parameters="self config submodules layer_number / vp_stage",
    )(init)
