"""Patch how Megatron's DDP reduces gradients and gathers updated parameters.

Why: both start in hooks and end in the background; only DDP knows which, and when.
Change: a trace gets each from its launch to its end, and the wait for it.
Remove when: Megatron's DDP calls hooks around its collectives.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch
from megatron.fold3d.plan.ir import Op
from megatron.fold3d.runtime.trace.recorder import no_end

if TYPE_CHECKING:
    from megatron.fold3d.runtime.trace.tracer import Tracer

_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collective:
    """DDP's names for a collective of a bucket group, and the trace's names for it.

    Attributes:
        start: the method that launches it, and the name of its parameter.
        finish: the method that waits for it, and the name of its parameter.
        handle: the attribute that holds its work between the two.
        is_over: returns True if ``finish`` of a bucket group has nothing left to wait for.
    """

    start: tuple[str, str]
    finish: tuple[str, str]
    handle: str
    launched: Op
    waited_for: Op
    kind: str
    is_over: Callable[[Any], bool]


_AGAIN = {Op.GATHER_PARAM: Op.GATHER_PARAM_B, Op.WAIT_PARAM: Op.WAIT_PARAM_B}

_REDUCE = _Collective(
    start=("start_grad_sync", "force_all_reduce"),
    finish=("finish_grad_sync", "force_all_reduce"),
    handle="grad_reduce_handle",
    launched=Op.REDUCE_GRAD,
    waited_for=Op.WAIT_GRAD,
    kind="grad_sync",
    is_over=lambda _: False,
)
_GATHER = _Collective(
    start=("start_param_sync", "force_sync"),
    finish=("finish_param_sync", "skip_next_bucket_dispatch"),
    handle="param_gather_handle",
    launched=Op.GATHER_PARAM,
    waited_for=Op.WAIT_PARAM,
    kind="param_gather",
    # Each module's hook calls ``finish`` again.
    is_over=lambda group: group.param_gather_dispatched and group.param_gather_handle is None,
)


def patches(tracer: "Tracer") -> tuple[Patch, ...]:
    """Return the patches of each collective's launch and of the wait for it."""
    return (*_patches(tracer, _REDUCE), *_patches(tracer, _GATHER))


def _patches(tracer: "Tracer", collective: _Collective) -> tuple[Patch, ...]:
    recorder = tracer.recorder
    ends: dict[Any, Callable[[], None]] = {}  # by bucket group, of collectives in flight

    def name(bucket_group: Any, op: Op) -> str:
        again = recorder.gathers_again
        return f"{tracer.stage_of(bucket_group)}{_AGAIN.get(op, op) if again else op}"

    def make_start(upstream: Callable[..., None]) -> Callable[..., None]:
        def start(self: Any, *args: Any, **kwargs: Any) -> None:
            def launch() -> Iterable[Any]:
                upstream(self, *args, **kwargs)
                return getattr(getattr(self, collective.handle), "works", ())

            if getattr(self, collective.handle) is not None:  # launched already
                launch()
            else:
                ends[self] = recorder.collective(
                    name(self, collective.launched), collective.kind, launch
                )

        return start

    def make_finish(upstream: Callable[..., None]) -> Callable[..., None]:
        def finish(self: Any, *args: Any, **kwargs: Any) -> None:
            if collective.is_over(self):
                upstream(self, *args, **kwargs)
                return
            with recorder.span(name(self, collective.waited_for), "wait"):
                upstream(self, *args, **kwargs)
            ends.pop(self, no_end)()

        return finish

    return tuple(
        Patch(target=f"{_BUCKETS}.{method}", parameters=("self", parameter), make=make)
        for (method, parameter), make in (
            (collective.start, make_start),
            (collective.finish, make_finish),
        )
    )
