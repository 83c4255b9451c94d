"""DP.sync of parameters whose gradients are complete while others' are still computed.

This is about DP.sync that ends with the iteration; `DeferredGradSync` starts the one that may not.
In a stage whose weight gradients are computed parameter by parameter, a slice of DP.sync starts
what is complete: all parts of DDP's buckets in which no unfinished parameter lies. They are
all-reduced or, with the distributed optimizer, reduced to shards.

    compute    .. 0B0 0B1 │ 0W: a  │ 0W: b  │ 0W: c  │
    DP.sync               └─ norms ├─── a ──┼─── b ──┼─── c ──│
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.passes.early_grad_sync import stages_in_parts
from megatron.fold3d.plan.passes.grad_sync import deferred_stages
from megatron.fold3d.runtime.device import Clock
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import group_of, is_sharded
from megatron.fold3d.runtime.grad_sync.complete_parts import CompleteParts, Part
from megatron.fold3d.runtime.grad_sync.shard_reductions import ShardReductions, Transfer
from megatron.fold3d.runtime.grad_sync.slices import Slice, reduce_op
from megatron.fold3d.runtime.trace.recorder import Recorder


class EarlySync(Feature):
    """Starts the reductions of such stages; their last REDUCE_GRAD starts what is left.

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
                unfinished = iteration.unfinished.get(stage, ())
                running[stage].start(unfinished, self._observer(stage), are_last=False)
            else:
                start_slice(action)

        def start_rest(action: Action) -> None:
            if action.stage in running:
                running[action.stage].start((), self._observer(action.stage), are_last=True)
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
    """The reductions of one chunk in an iteration."""

    chunk: Any
    clock: Clock
    parts: CompleteParts
    shards: ShardReductions = field(default_factory=ShardReductions)
    works: list[Transfer] = field(default_factory=list)
    ends: list[Callable[[], None]] = field(default_factory=list)  # not observed

    def start(
        self,
        unfinished: Collection[torch.Tensor],
        observe: Callable[[], Callable[[], None]] | None,
        *,
        are_last: bool,
    ) -> None:
        """Start to reduce what is complete and has not been started."""
        parts: dict[bool, list[Part]] = {True: [], False: []}  # by whether they are sharded
        for part in self.parts.take(unfinished):
            sharded = is_sharded(part.bucket_group) and not self.chunk.force_all_reduce
            parts[sharded].append(part)
        works: list[Transfer] = [*map(_all_reduce, parts[False])]
        works += self.shards.start(parts[True], are_last=are_last)
        self.works += works
        end = observe() if observe and works else None
        if end is not None and not self.clock.when_done(works, end):
            self.ends.append(end)

    def wait(self) -> None:
        """Wait for what has been started."""
        for work in self.works:
            work.wait()
        for end in self.ends:
            end()
        self.works.clear()
        self.ends.clear()


def _begin(iteration: Iteration) -> dict[int, _Running]:
    """Return what an iteration starts early, by stage."""
    running: dict[int, _Running] = {}
    program = iteration.program
    stages = stages_in_parts(program) - deferred_stages(program) if iteration.trains else ()
    for stage in stages:
        chunk: Any = iteration.chunks[stage // iteration.plan.num_ranks]
        running[stage] = _Running(chunk, Clock(iteration.device), CompleteParts(chunk))
    return running


def _unknown(action: Action) -> None:
    raise AssertionError(f"nothing in this run can run {action}")


def _all_reduce(part: Part) -> Transfer:
    return Slice(part.data, reduce_op(part.bucket_group), group_of(part.bucket_group)).reduce()
