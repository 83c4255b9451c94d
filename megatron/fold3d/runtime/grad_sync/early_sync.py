"""DP.sync of parameters whose gradients are complete while others' are still computed.

In a stage whose weight gradients are computed parameter by parameter, a slice of DP.sync starts
what is complete: all parts of DDP's buckets in which no unfinished parameter lies.

    compute    .. 0B0 0B1 │ 0W: a  │ 0W: b  │ 0W: c  │
    DP.sync               └─ norms ├─── a ──┼─── b ──┼─── c ──│

Keeps one invariant: each gradient is scaled and reduced once, when it is complete.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.passes.early_grad_sync import early_stages
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, group_of, is_sharded
from megatron.fold3d.runtime.grad_sync.slices import Slice, outside, ranges_of, reduce_op
from megatron.fold3d.runtime.trace.recorder import Recorder, when_done

Range = tuple[int, int]


class EarlySync(Feature):
    """Starts the all-reduces of such stages; their last REDUCE_GRAD starts what is left.

    Args:
        recorder: the recorder of the trace, if there is one.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return the handlers of DP.sync; they leave other stages to the ``inner`` ones."""
        running = _begin(iteration)
        if not running:
            return {}
        start_slice, reduce, wait = (
            inner.get(op, _unknown) for op in (Op.REDUCE_SLICE, Op.REDUCE_GRAD, Op.WAIT_GRAD)
        )

        def start(action: Action) -> None:
            stage = action.stage
            if stage in running:
                running[stage].start(iteration.unfinished.get(stage, ()), self._observer(stage))
            else:
                start_slice(action)

        def start_rest(action: Action) -> None:
            if action.stage in running:
                running[action.stage].start((), self._observer(action.stage))
            reduce(action)

        def wait_for(action: Action) -> None:
            if action.stage in running:
                running[action.stage].wait()
            wait(action)

        return {Op.REDUCE_SLICE: start, Op.REDUCE_GRAD: start_rest, Op.WAIT_GRAD: wait_for}

    def _observer(self, stage: int) -> Callable[[], Callable[[], None]] | None:
        recorder = self._recorder
        if recorder is None:
            return None
        return lambda: recorder.open_span(Action(stage, Op.REDUCE_GRAD), "grad_sync")


@dataclass(slots=True)
class _Running:
    """The all-reduces of one chunk in an iteration."""

    chunk: Any
    started: dict[Any, list[Range]] = field(default_factory=dict)  # by bucket
    works: list[dist.Work] = field(default_factory=list)
    ends: list[Callable[[], None]] = field(default_factory=list)  # not observed

    def start(
        self,
        unfinished: Collection[torch.Tensor],
        observe: Callable[[], Callable[[], None]] | None,
    ) -> None:
        """Start to reduce what is complete and has not been started."""
        parts = list(self._complete(unfinished))
        if not parts:
            return
        end = observe() if observe else None
        works = [_reduce(bucket_group, bucket, part) for bucket_group, bucket, part in parts]
        self.works += works
        if end is not None and not when_done(works, end):
            self.ends.append(end)

    def wait(self) -> None:
        """Wait for what has been started."""
        for work in self.works:
            work.wait()
        for end in self.ends:
            end()
        self.works.clear()
        self.ends.clear()

    def _complete(self, unfinished: Collection[torch.Tensor]) -> Iterator[tuple[Any, Any, Range]]:
        for bucket_group in bucket_groups(self.chunk):
            bucket_group.grad_reduce_finished = True  # DDP then neither starts it nor waits for it
            for bucket in bucket_group.buckets:
                begun = self.started.setdefault(bucket, [])
                kept = sorted([*ranges_of(bucket, unfinished), *begun])
                for part in list(outside(kept, bucket.grad_data.numel())):
                    begun.append(part)
                    yield bucket_group, bucket, part


def _begin(iteration: Iteration) -> dict[int, _Running]:
    """Return what an iteration starts early, by stage."""
    running: dict[int, _Running] = {}
    for stage in early_stages(iteration.program) if iteration.trains else ():
        chunk: Any = iteration.chunks[stage // iteration.plan.num_ranks]
        sharded = any(map(is_sharded, bucket_groups(chunk)))
        # A shard has parts of nearly all parameters, so nothing of it would be complete early.
        assert chunk.force_all_reduce or not sharded, f"stage {stage} is reduce-scattered"
        running[stage] = _Running(chunk)
    return running


def _unknown(action: Action) -> None:
    raise AssertionError(f"nothing in this run can run {action}")


def _reduce(bucket_group: Any, bucket: Any, part: Range) -> dist.Work:
    """Check, scale and reduce a part of a bucket as Megatron does with whole buckets."""
    data = bucket.grad_data[slice(*part)]
    config = bucket_group.ddp_config
    if config.check_for_nan_in_grad or config.check_for_large_grads:
        alone = SimpleNamespace(buckets=[SimpleNamespace(grad_data=data)])
        type(bucket_group).check_grads(
            alone,
            check_for_nan_or_inf=config.check_for_nan_in_grad,
            check_for_large=config.check_for_large_grads,
        )
    if bucket.gradient_scaling_factor != 1.0:
        data *= bucket.gradient_scaling_factor
    return Slice(data, reduce_op(bucket_group), group_of(bucket_group)).reduce()
