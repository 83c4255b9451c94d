"""Patch ``megatron.training.initialize.initialize_megatron``.

Why: ``pretrain`` calls it without ``allow_no_cuda``, and it then asserts that CUDA is there.
Change: the argument is True.
Remove when: ``pretrain`` passes ``allow_no_cuda`` on.
"""

import functools
from collections.abc import Callable
from typing import Any

from fold3d_patches.registry import Patch


def _allow_no_cuda(upstream: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(upstream, allow_no_cuda=True)


def patch() -> Patch:
    """The one assertion that stops a run without CUDA."""
    return Patch(
        target="megatron.training.initialize:initialize_megatron",
        rebinds=(
            "megatron.training:initialize_megatron",
            "megatron.training.training:initialize_megatron",
        ),
        parameters=(
            *("allow_no_cuda", "skip_mpu_initialization", "get_embedding_ranks"),
            *("get_position_embedding_ranks", "store", "skip_model_parallel_init"),
            *("seed_pp_group", "seed_dp_group", "seed_tp_group", "seed_ep_group"),
            *("seed_etp_group", "skip_random_seed"),
        ),
        make=_allow_no_cuda,
    )
