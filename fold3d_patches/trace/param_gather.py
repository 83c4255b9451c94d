"""Patch how Megatron's DDP gathers the parameters that a distributed optimizer has updated.

Why: the gathers start in hooks of the forward before and end in the background.
Change: a trace gets each from its launch to its end, and how long a forward waits for its own.
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
    """The launch of a bucket group's gather, and the wait for it."""
    recorder = tracer.recorder
    ends: dict[Any, Callable[[], None]] = {}  # by bucket group, of what is under way

    def make_start(upstream: Callable[..., None]) -> Callable[..., None]:
        def start_param_sync(self: Any, *args: Any, **kwargs: Any) -> None:
            def launch() -> Iterable[Any]:
                upstream(self, *args, **kwargs)
                return getattr(self.param_gather_handle, "works", ())

            if self.param_gather_handle is not None:  # launched already
                launch()
            else:
                name = f"{tracer.stage_of(self)}GATHER_PARAM"
                ends[self] = recorder.collective(name, "param_gather", launch)

        return start_param_sync

    def make_finish(upstream: Callable[..., None]) -> Callable[..., None]:
        def finish_param_sync(self: Any, *args: Any, **kwargs: Any) -> None:
            if self.param_gather_dispatched and self.param_gather_handle is None:
                upstream(self, *args, **kwargs)  # over, and asked for again by each module
                return
            with recorder.span(f"{tracer.stage_of(self)}WAIT_PARAM", "wait"):
                upstream(self, *args, **kwargs)
            ends.pop(self, no_end)()

        return finish_param_sync

    return (
        Patch(
            target=f"{_BUCKETS}.start_param_sync",
            parameters=("self", "force_sync"),
            make=make_start,
        ),
        Patch(
            target=f"{_BUCKETS}.finish_param_sync",
            parameters=("self", "skip_next_bucket_dispatch"),
            make=make_finish,
        ),
    )
