"""Patch how Megatron's DDP reduces gradients and gathers updated parameters.

Why: both start in hooks and end in the background; only DDP knows which, and when.
Change: a trace gets each from its launch to its end, and the wait for it.
Remove when: Megatron's DDP calls hooks around its collectives.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fold3d_patches.registry import Patch, around
from megatron.fold3d.plan.ir import Op
from megatron.fold3d.plan.ops import GATHER_OPS
from megatron.fold3d.runtime.events import no_end
from megatron.fold3d.runtime.trace.tracer import Tracer

_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"


def patches(tracer: Tracer) -> tuple[Patch, ...]:
    """Return the patches of each collective's launch and of the wait for it."""

    def sums(group: Any, force_all_reduce: bool = False) -> Op:
        is_sharded = group.ddp_config.use_distributed_optimizer and not force_all_reduce
        return Op.REDUCE_SCATTER if is_sharded else Op.ALL_REDUCE

    def gathers(*_: Any, **__: Any) -> Op:
        running = tracer.recorder.running
        return running.op if running is not None and running.op in GATHER_OPS else Op.ALL_GATHER

    return (
        *_patches(tracer, "grad", "grad_sync", sums, "force_all_reduce", "force_all_reduce"),
        *_patches(
            tracer, "param", "param_gather", gathers, "force_sync", "skip_next_bucket_dispatch"
        ),
    )


def _patches(
    tracer: Tracer, of: str, kind: str, launched: Callable[..., Op], *parameters: str
) -> tuple[Patch, ...]:
    """Return the patches of the launch of one kind of collective, and of the wait for it.

    Args:
        of: what DDP calls it in the names of its methods.
        launched: returns the op that a launch with these arguments is.
        parameters: of the launching and the waiting method.
    """
    recorder = tracer.recorder
    handle = "grad_reduce_handle" if of == "grad" else "param_gather_handle"  # between the two
    names: dict[Any, str] = {}  # by bucket group, of the collective that was launched last
    ends: dict[Any, Callable[[], None]] = {}  # by bucket group, of collectives in flight

    def name(self: Any, *args: Any, **kwargs: Any) -> str:
        return f"{tracer.stages.get(self)}{launched(self, *args, **kwargs)}"

    def start(upstream: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        def launch() -> Sequence[Any]:
            upstream(self, *args, **kwargs)
            return getattr(getattr(self, handle), "works", ())

        if getattr(self, handle) is not None:  # launched already
            launch()
        else:
            names[self] = name(self, *args, **kwargs)
            _, ends[self] = recorder.collective(names[self], kind, launch)

    def finish(upstream: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        # Each module's hook waits again for gathered parameters.
        if of == "param" and self.param_gather_dispatched and getattr(self, handle) is None:
            upstream(self, *args, **kwargs)
            return
        awaited = names.get(self) or name(self, *args, **kwargs)
        with recorder.span(f"wait {awaited}", "wait"):
            upstream(self, *args, **kwargs)
        ends.pop(self, no_end)()

    return tuple(
        around(f"{_BUCKETS}.{ours.__name__}_{of}_sync", parameters=f"self / {parameter}")(ours)
        for ours, parameter in zip((start, finish), parameters, strict=True)
    )
