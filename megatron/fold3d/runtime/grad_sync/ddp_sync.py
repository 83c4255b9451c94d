"""DP.sync, one segment at a time, through Megatron's DDP and its hooks.

Keeps one invariant: within an iteration a bucket's gradients are reduced once, either by DDP's
hooks inside the segment's last backward or by an explicit start after it, never by both.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.runtime.feature import Feature, Handler, Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups


class GradSync(Feature):
    """Gradient reduction and parameter gathering of the model chunks of one rank.

    For the length of an iteration it keeps DDP's hooks quiet; a segment whose last backward is
    about to run is released by `release`, and `reduce` starts what hooks did not.
    """

    draining = "the last sums of gradients, behind its program"

    def __init__(self) -> None:
        self._chunks: Sequence[Any] = ()
        self._quiet: Sequence[ExitStack] = ()
        self._no_sync: Sequence[Callable[..., Any]] | None = None
        self._gathers = False

    def prepare(self, iteration: Iteration) -> None:
        """Keep DDP's hooks quiet until the iteration ends."""
        config, self._chunks = iteration.config, iteration.chunks
        self._quiet = [iteration.ends.enter_context(ExitStack()) for _ in self._chunks]
        # Megatron sets the first with --overlap-grad-reduce; else nothing can start early. The
        # second it leaves out as long as parameters are whole, and where hooks gather them.
        self._no_sync = _per_chunk(config.no_sync_func, self._chunks)
        self._gathers = iteration.trains and config.param_sync_func is not None
        for segment in range(len(self._chunks)):
            self._hush(segment)

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Reduce and gather segments; release one before the last that adds to its gradients."""
        run_backward = inner[Op.BACKWARD]
        adds = {a.stage: a for a in iteration.program if a.op in (Op.BACKWARD, Op.WEIGHT)}
        last = frozenset(adds.values())  # weight gradients of their own are reduced when all are in

        def backward(action: Action) -> None:
            if action in last:
                self.release(iteration.segment(action))
            run_backward(action)

        def of_segment(act: Callable[[int], None]) -> Handler:
            return lambda action: act(iteration.segment(action))

        return {
            Op.BACKWARD: backward,
            Op.REDUCE_GRAD: of_segment(self.reduce),
            Op.WAIT_GRAD: of_segment(self.wait),
            Op.GATHER_PARAM: of_segment(self.gather),
            # DDP's hooks wait in the forward, so that a layer waits for its own buckets only.
            Op.WAIT_PARAM: lambda _: None,
        }

    def drain(self, iteration: Iteration) -> None:
        """Leave the last sums of gradients to Megatron."""
        config = iteration.config
        if config.finalize_model_grads_func is not None and iteration.trains:
            config.finalize_model_grads_func(
                iteration.chunks,
                iteration.num_tokens if config.calculate_per_token_loss else None,
                pg_collection=iteration.groups,
                force_all_reduce=iteration.force_all_reduce,
            )

    def release(self, segment: int) -> None:
        """Let hooks reduce the gradients that become ready from now on: the last micro-batch's."""
        self._quiet[segment].close()

    def reduce(self, segment: int) -> None:
        """Start to reduce a segment's gradients, which are complete."""
        self._quiet[segment].close()
        if self._no_sync is not None:
            for bucket_group in bucket_groups(self._chunks[segment]):
                _forget_partial_counts(bucket_group)
        self.start_reduction(segment)

    def start_reduction(self, segment: int) -> None:
        """Start to reduce what hooks did not: in the first iteration DDP has them only count."""
        chunk = self._chunks[segment]
        if self._no_sync is not None:
            for bucket_group in bucket_groups(chunk):
                if not (_reduced_by_hooks(bucket_group) or _reduced_when_finished(bucket_group)):
                    bucket_group.start_grad_sync(force_all_reduce=chunk.force_all_reduce)

    def wait(self, segment: int) -> None:
        """End the segment's reduction.

        Megatron's ``finalize_model_grads`` then finds it ended and goes on to the next.
        """
        chunk = self._chunks[segment]
        if self._no_sync is not None:
            chunk.finish_grad_sync(force_all_reduce=chunk.force_all_reduce)

    def gather(self, segment: int) -> None:
        """Start to gather the segment's updated parameters, those of its first layers first.

        DDP's hooks wait in the forward, each layer for its own buckets, and gather what is not
        under way.
        """
        if self._gathers:
            last_layer_first = tuple(bucket_groups(self._chunks[segment]))
            for bucket_group in reversed(last_layer_first):
                if not bucket_group.param_gather_dispatched:
                    bucket_group.start_param_sync()

    def _hush(self, segment: int) -> None:
        if self._no_sync is not None:
            self._quiet[segment].enter_context(self._no_sync[segment]())


def _reduced_by_hooks(bucket_group: Any) -> bool:
    """Whether DDP's hooks have started the reduction: all gradients came as often as they should.

    The first iteration counts how often that is; hooks start nothing in it.
    """
    return bool(
        not bucket_group.is_first_batch
        and bucket_group.per_param_grad_ready_counts
        == bucket_group.golden_per_param_grad_ready_counts
    )


def _reduced_when_finished(bucket_group: Any) -> bool:
    """Whether ``finish_grad_sync`` starts the reduction itself, even if somebody has before.

    It does so as long as hooks only count, unless it finds the handle of a reduction. Several
    instances of the distributed optimizer wait for a stream and keep no handles.
    """
    return bool(
        bucket_group.is_first_batch
        and bucket_group.ddp_config.num_distributed_optimizer_instances > 1
    )


def _forget_partial_counts(bucket_group: Any) -> None:
    """Let DDP go on counting where some parameter has no gradient, and its hook never comes.

    It would wait for all hooks from the second iteration on. Multi-token prediction leaves the last
    stage's output layer unused where embeddings are tied.
    """
    counts = bucket_group.per_param_grad_ready_counts
    if bucket_group.is_first_batch and len(counts) < len(bucket_group.params):
        counts.clear()


def _per_chunk(
    function: Any, chunks: Sequence[torch.nn.Module]
) -> Sequence[Callable[..., Any]] | None:
    """Megatron keeps one function per chunk, a bare one for a single chunk, or None."""
    if function is None or isinstance(function, list):
        return function
    return [function] * len(chunks)
