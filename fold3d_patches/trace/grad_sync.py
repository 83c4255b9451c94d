"""Patch how Megatron's DDP reduces gradients.

Why: reductions start in hooks and end in the background; only DDP knows which, and when.
Change: a trace gets each from its launch to its end, and the wait for it.
Remove when: Megatron's DDP calls hooks around its collectives.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch
from megatron.fold3d.runtime.recorder import no_end

if TYPE_CHECKING:
    from megatron.fold3d.runtime.tracer import Tracer

_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"


def patches(tracer: "Tracer") -> tuple[Patch, ...]:
    """The launch of a bucket group's reduction, and the wait for it."""
    recorder = tracer.recorder
    ends: dict[Any, Callable[[], None]] = {}  # by bucket group, of what is under way

    def make_start(upstream: Callable[..., None]) -> Callable[..., None]:
        def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
            def launch() -> Iterable[Any]:
                upstream(self, *args, **kwargs)
                return getattr(self.grad_reduce_handle, "works", ())

            if self.grad_reduce_handle is not None:  # launched already
                launch()
            else:
                name = f"{tracer.stage_of(self)}REDUCE_GRAD"
                ends[self] = recorder.collective(name, "grad_sync", launch)

        return start_grad_sync

    def make_finish(upstream: Callable[..., None]) -> Callable[..., None]:
        def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
            with recorder.span(f"{tracer.stage_of(self)}WAIT_GRAD", "wait"):
                upstream(self, *args, **kwargs)
            ends.pop(self, no_end)()

        return finish_grad_sync

    parameters = ("self", "force_all_reduce")
    return (
        Patch(target=f"{_BUCKETS}.start_grad_sync", parameters=parameters, make=make_start),
        Patch(target=f"{_BUCKETS}.finish_grad_sync", parameters=parameters, make=make_finish),
    )
