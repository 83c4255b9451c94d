"""Patch the stance of ``torch.compile``, and Megatron's warm-up of what it compiles.

Why: Megatron decorates its fusions with ``torch.compile`` at import. On a CPU that costs minutes
    of C++ compilation per rank, and nothing needs it. The warm-up calls them with random tensors;
    on a CPU these come from the generator that draws the weights, which would then depend on the
    micro-batch size, the sequence length and sequence parallelism.
Change: decorated functions run uncompiled, as under ``torch.compiler.set_stance``; nothing is
    warmed up.
Remove when: Megatron decides about ``jit_fuser`` per run and not at import.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fold3d_patches.registry import Patch, replace


@contextmanager
def uncompiled() -> Iterator[None]:
    """Leave functions as they are that are decorated with ``torch.compile`` meanwhile.

    To decorate one imports torch's compiler: half of the time that importing Megatron takes.
    """

    def leave(model: Any = None, **_options: Any) -> Any:
        return model if model is not None else leave

    upstream = torch.compile
    torch.compile = leave
    try:
        yield
    finally:
        torch.compile = upstream


PATCHES = (
    Patch(
        target="torch._dynamo.eval_frame:_stance",  # which torch reads at each call
        make=lambda stance: dataclasses.replace(stance, stance="force_eager"),
    ),
    replace("megatron.training.initialize:_warmup_jit_function", lambda *_args, **_kwargs: None),
)
