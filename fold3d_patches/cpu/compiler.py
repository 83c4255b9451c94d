"""Patch the stance of ``torch.compile``.

Why: Megatron decorates its fusions with ``torch.compile`` at import. On a CPU that costs minutes
    of C++ compilation per rank, and nothing needs it.
Change: what is decorated runs as it is written; it is what ``torch.compiler.set_stance`` sets.
Remove when: Megatron decides about ``jit_fuser`` per run and not at import.
"""

import dataclasses
from typing import Any

from fold3d_patches.registry import Patch


def _force_eager(upstream: Any) -> Any:
    return dataclasses.replace(upstream, stance="force_eager")


def patch() -> Patch:
    """The stance that torch reads each time a compiled function is called."""
    return Patch(target="torch._dynamo.eval_frame:_stance", make=_force_eager)
