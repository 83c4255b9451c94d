"""Patch Megatron's wrapper of torch's FSDP2, and ``FSDPParamGroup`` of torch itself.

Why: the wrapper names its mesh "cuda", and FSDP2 then looks for a GPU. And FSDP2 has no plan whose
    actions a bench could count bytes behind.
Change: the mesh is one of CPUs. What a rank holds is counted when a group of parameters has been
    gathered, and when a group's gradients are complete. Which modules are sharded, and when they
    are gathered, stay Megatron's and torch's.
Remove when: Megatron names the device of its process group.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from fold3d_patches.registry import Patch
from scripts.bench.resident import Resident

_WRAPPER = "megatron.core.distributed.torch_fully_sharded_data_parallel"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"


def patches(found: Resident) -> tuple[Patch, ...]:
    """Let ``--use-torch-fsdp2`` run on gloo, and count what a rank holds in ``found``."""
    groups: dict[Any, None] = {}

    def on_cpu(upstream: Any) -> Any:
        return SimpleNamespace(from_group=lambda group, _: upstream.from_group(group, "cpu"))

    def count() -> None:
        parameters = sum(map(_parameter_bytes, groups))
        gradients = sum(g.nbytes for group in groups for g in _gradients(group))
        found.most = max(found.most[0], parameters), max(found.most[1], gradients)
        whole = sum(p.sharded_size.numel() * _world(g) for g in groups for p in g.fsdp_params)
        found.whole = 2 * whole, 2 * whole  # in bf16, both

    def counting_behind(upstream: Callable[..., None]) -> Callable[..., None]:
        def wait_for_unshard(self: Any) -> None:
            groups[self] = None
            upstream(self)
            count()

        return wait_for_unshard

    def counting_before(upstream: Callable[..., None]) -> Callable[..., None]:
        def post_backward(self: Any, *unused: Any) -> None:
            count()
            upstream(self, *unused)

        return post_backward

    return (
        Patch(target=f"{_WRAPPER}:DeviceMesh", make=on_cpu),
        Patch(target=f"{_GROUP}.wait_for_unshard", make=counting_behind),
        Patch(target=f"{_GROUP}.post_backward", make=counting_before),
    )


def _world(group: Any) -> int:
    return int(group.mesh_info.shard_mesh_size)


def _parameter_bytes(group: Any) -> int:
    """Return the bytes of a group's shards, and of what is gathered or under way."""
    under_way = group._all_gather_result
    held = [under_way.all_gather_output] if under_way else []
    for parameter in group.fsdp_params:
        held += [parameter._sharded_param_data, *parameter.all_gather_outputs]
    return sum(tensor.untyped_storage().size() for tensor in held)


def _gradients(group: Any) -> Iterator[torch.Tensor]:
    """Yield a group's gradients: those of backwards that are not reduced, and the sums' shards."""
    for parameter in group.fsdp_params:
        whole = getattr(parameter, "_unsharded_param", None)
        found = [None if whole is None else whole.grad, parameter.unsharded_accumulated_grad]
        if (shard := parameter.sharded_param.grad) is not None:
            found.append(shard.to_local())
        yield from (gradient for gradient in found if gradient is not None)
