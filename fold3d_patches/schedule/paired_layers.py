"""Patch what Megatron's layers note of the micro-batch that passes them.

Why: a layer keeps a module's checkpoint as an attribute, and discards the module's output when
    what follows is computed. Its token dispatcher notes counts, splits and permutations, and waits
    for its tokens before it sends their probabilities. The other micro-batch of a pair passes the
    same layer meanwhile.
Change: with pairs, each micro-batch discards its own innermost output, and has a dispatcher of its
    own, which sends both and then waits.
Remove when: Megatron keeps checkpoints in variables of a forward, passes a dispatcher's notes from
    dispatch to combine, and waits once.
"""

from collections.abc import Callable
from typing import Any

from fold3d_patches.registry import Patch, around
from megatron.fold3d.runtime.tensor_parallel.baton import Baton
from megatron.fold3d.runtime.tensor_parallel.paired_experts import PairedDispatcher

_CHECKPOINT = "megatron.core.tensor_parallel.random:CheckpointWithoutOutput"


def patches(baton: Baton) -> tuple[Patch, ...]:
    """Return the patches that keep what two micro-batches leave in a layer apart."""
    kept: tuple[list[Any], list[Any]] = [], []  # checkpoints of each side, the innermost last

    @around(f"{_CHECKPOINT}.checkpoint")
    def checkpoint(upstream: Callable[..., Any], self: Any, *args: Any) -> Any:
        kept[baton.side()].append(self)
        return upstream(self, *args)

    @around(f"{_CHECKPOINT}.discard_output_and_register_recompute")
    def discard(upstream: Callable[..., None], _: Any, hook_tensor: Any) -> None:
        upstream(kept[baton.side()].pop(), hook_tensor)

    @around("megatron.core.transformer.moe.moe_layer:MoELayer.__init__")
    def init(upstream: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        self.token_dispatcher = PairedDispatcher(self.token_dispatcher, baton)

    return checkpoint, discard, init
