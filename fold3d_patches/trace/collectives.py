"""Patch how Megatron's DDP reduces gradients and gathers updated parameters.

Why: both start in hooks and end in the background; only DDP knows which, and when.
Change: a trace gets each from its launch to its end, and the wait for it.
Remove when: Megatron's DDP calls hooks around its collectives.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fold3d_patches.registry import Patch
from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.ops import GATHER_OPS
from megatron.fold3d.runtime.events import no_end

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
        launched: returns the op, by the action that runs and the arguments of ``start``.
        is_over: returns True if ``finish`` of a bucket group has nothing left to wait for.
    """

    start: tuple[str, str]
    finish: tuple[str, str]
    handle: str
    launched: Callable[..., Op]
    kind: str
    is_over: Callable[[Any], bool]


def _sum(_: Action | None, group: Any, force_all_reduce: bool = False) -> Op:
    is_sharded = group.ddp_config.use_distributed_optimizer and not force_all_reduce
    return Op.REDUCE_SCATTER if is_sharded else Op.ALL_REDUCE


def _gather(running: Action | None, *_: Any, **__: Any) -> Op:
    return running.op if running is not None and running.op in GATHER_OPS else Op.ALL_GATHER


_REDUCE = _Collective(
    start=("start_grad_sync", "force_all_reduce"),
    finish=("finish_grad_sync", "force_all_reduce"),
    handle="grad_reduce_handle",
    launched=_sum,
    kind="grad_sync",
    is_over=lambda _: False,
)
_GATHER = _Collective(
    start=("start_param_sync", "force_sync"),
    finish=("finish_param_sync", "skip_next_bucket_dispatch"),
    handle="param_gather_handle",
    launched=_gather,
    kind="param_gather",
    # Each module's hook calls ``finish`` again.
    is_over=lambda group: group.param_gather_dispatched and group.param_gather_handle is None,
)


def patches(tracer: "Tracer") -> tuple[Patch, ...]:
    """Return the patches of each collective's launch and of the wait for it."""
    return (*_patches(tracer, _REDUCE), *_patches(tracer, _GATHER))


def _patches(tracer: "Tracer", collective: _Collective) -> tuple[Patch, ...]:
    recorder = tracer.recorder
    names: dict[Any, str] = {}  # by bucket group, of the collective that was launched last
    ends: dict[Any, Callable[[], None]] = {}  # by bucket group, of collectives in flight

    def name(self: Any, *args: Any, **kwargs: Any) -> str:
        op = collective.launched(recorder.running, self, *args, **kwargs)
        return f"{tracer.stage_of(self)}{op}"

    def make_start(upstream: Callable[..., None]) -> Callable[..., None]:
        def start(self: Any, *args: Any, **kwargs: Any) -> None:
            def launch() -> Iterable[Any]:
                upstream(self, *args, **kwargs)
                return getattr(getattr(self, collective.handle), "works", ())

            if getattr(self, collective.handle) is not None:  # launched already
                launch()
            else:
                names[self] = name(self, *args, **kwargs)
                ends[self] = recorder.collective(names[self], collective.kind, launch)

        return start

    def make_finish(upstream: Callable[..., None]) -> Callable[..., None]:
        def finish(self: Any, *args: Any, **kwargs: Any) -> None:
            if collective.is_over(self):
                upstream(self, *args, **kwargs)
                return
            awaited = names.get(self) or name(self, *args, **kwargs)
            with recorder.span(f"wait {awaited}", "wait"):
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
