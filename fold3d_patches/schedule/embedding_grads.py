"""Patch ``megatron.core.distributed.finalize_model_grads._allreduce_embedding_grad``.

Why: the first and the last pipeline stage sum the gradients of tied word embeddings at the end of
    an iteration, when nothing is left to overlap them. With the distributed optimizer each replica
    then reads its own shard alone, the same one in both stages.
Change: only this shard is summed.
Remove when: Megatron sums no more than the shard.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fold3d_patches.registry import around
from megatron.fold3d.runtime.grad_sync.stage_gradients import own_shard


@around(
    "megatron.core.distributed.finalize_model_grads:_allreduce_embedding_grad",
    parameters="model embd_group pp_group weight_getter /",
)
def _sum_own_shard(
    upstream: Callable[..., None],
    model: Any,
    embd_group: Any,
    pp_group: Any,
    weight_getter: Any,
    *others: Any,
    **named: Any,
) -> None:
    def get(module: Any) -> Any:
        weight = weight_getter(module)
        shard = None if weight is None else own_shard(model, weight, embd_group)
        return weight if shard is None else SimpleNamespace(main_grad=shard)

    upstream(model, embd_group, pp_group, get, *others, **named)


PATCHES = (_sum_own_shard,)
