"""DP.sync that reaches into the next iteration: the paper's free split (Algorithm 2).

A part of each model chunk's gradients is reduced as soon as its last backward is through. The rest
follows in the order in which the next forward needs the chunks: that of the first chunk when all
backwards are through, those of the others when the next iteration begins. In between Megatron sums
up what is small and waited for, such as norms and losses, which would share the links with them.
Right before its first forward a chunk waits for its gradients and takes the optimizer step of their
iteration. `DeferredReductions` reduces; the steps are here.

    segments 0 and 1 of a rank; a is the backward share of a segment's DP.sync, b the rest

    compute    .. 1B ..┐ .. 0B ..┐ sums, losses │┌ 0WAIT  .. 0F ..  ┌ 1WAIT  .. 1F ..
                       │         │              ││ step 0           │ step 1
    DP.sync            └── 1a    └── 0a ── 0b ──│┘                  │
                                                └── 1b ─────────────┘
               iteration i                      │ iteration i + 1

Keeps one invariant: from the start of its reduction until its step, nobody else reads a chunk's
gradients, adds to them or zeroes them, and nobody reads its parameters. What Megatron changes or
looks at when the iteration ends is reduced by then: `reduced_in_iteration`, or all of it where
only the gradients themselves can tell whether there will be a step.
"""

import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import log_single_rank

from megatron.fold3d.runtime.grad_sync.bucket_groups import (
    bucket_groups,
    everyones_groups,
    ranks_of,
)
from megatron.fold3d.runtime.grad_sync.deferred_reductions import DeferredReductions
from megatron.fold3d.runtime.grad_sync.norm_bound import Bound, NormBound, is_conditional
from megatron.fold3d.runtime.grad_sync.partial_step import PartialStep
from megatron.fold3d.runtime.grad_sync.reduced_in_iteration import reduced_in_iteration
from megatron.fold3d.runtime.trace.recorder import Recorder

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.measured_shares import AutoShares
    from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator

logger = logging.getLogger(__name__)

Outcome = tuple[bool, float | None, int | None]
"""What Megatron's optimizer says of a step: was it taken, the gradients' norm, their zeros."""

Report = Callable[[float], None]
"""Told the norm of an iteration's gradients, on all ranks, once all are known."""


class DeferredSync:
    """Reductions and optimizer steps of one rank's model chunks, over all iterations.

    A chunk's step becomes *due* when Megatron asks for the optimizer step. An iteration that is run
    again, which happens before that, drops the reduction.

    Args:
        backward_share: of every segment's DP.sync, the part that starts with its backward.
        slice_bytes: what is reduced at once; a slice that has begun delays what is needed sooner.
        bounded: whether steps may be clipped or skipped; a step is then taken late only if a bound
            on the norm rules that out.
        timeout: of a reduction.
        communicator: starts the slices; without one they start at once.
        auto: measures some iterations, and from then on decides the share of each segment.
        recorder: of a trace.
        traffic_class: marks the packets of reductions.
    """

    def __init__(
        self,
        backward_share: float,
        *,
        slice_bytes: int,
        bounded: bool,
        timeout: timedelta,
        communicator: "PreemptiveCommunicator | None" = None,
        auto: "AutoShares | None" = None,
        recorder: Recorder | None = None,
        traffic_class: int | None = None,
    ) -> None:
        self._bounded = bounded
        self._timeout = timeout
        self._reductions = DeferredReductions(
            backward_share,
            slice_bytes=slice_bytes,
            timeout=timeout,
            communicator=communicator,
            auto=auto,
            recorder=recorder,
            traffic_class=traffic_class,
        )

        # Known with the first iteration.
        self._chunks: Sequence[Any] = ()
        self._reduced_in_iteration: AbstractSet[torch.nn.Parameter] = frozenset()
        self._norm_bound: NormBound | None = None
        self._alone: dist.ProcessGroup | None = None
        self._in_iteration = False

        # Of the step that Megatron asked for last.
        self._step: PartialStep | None = None
        self._report: Report | None = None
        self._is_logged = False  # its norm
        self._bound: Bound | None = None
        self._due: set[Any] = set()  # chunks
        self._num_late = self._num_whole = 0  # of all steps

    def prepare(self, chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> None:
        """Begin an iteration; all ranks of the job call this together."""
        self._reductions.start_rest()
        self._in_iteration = True
        if not self._chunks:
            self._connect(chunks, groups)
        self._reductions.update_shares()

    def set_shares(self, shares: Sequence[float]) -> None:
        """Start the share ``shares[segment]`` with a segment's backward, from the next iteration.

        All replicas of a stage are to be given the same ones.
        """
        self._reductions.set_shares(shares)

    def start(self, chunk: Any) -> None:
        """Start to reduce the backward share of a chunk's gradients, which are complete."""
        slices = self._reductions.cut_chunk(chunk)
        if self._norm_bound is not None:
            self._norm_bound.add(self._chunks.index(chunk), slices)
        self._reductions.start_chunk(chunk, slices)

    def finish_backward(self) -> None:
        """Start what the next forward waits for first; all backwards are through."""
        self._in_iteration = False
        self._reductions.finish_backward()

    def finish_step(self, chunk: Any) -> None:
        """If a chunk's step is due, wait for its gradients, step with them and zero them."""
        if chunk in self._due:
            assert self._step is not None
            self._reductions.wait_for(chunk)
            self._step.take(chunk.parameters())
            self._due.remove(chunk)
            chunk.zero_grad_buffer()

    def step(
        self,
        optimizer: Any,
        iteration: int,
        whole_step: Callable[[], Outcome],
        *,
        report: Report | None = None,
        logs: bool = True,
    ) -> Outcome:
        """Step the chunks whose gradients are reduced; the others are due from now on.

        `finish_step` steps those with the settings of this iteration. Where that could differ from
        Megatron's ``whole_step``, wait for all gradients and take it.

        Args:
            optimizer: Megatron's.
            iteration: whose step this is.
            whole_step: takes it at once.
            report: is told the norm of the gradients, if the outcome does not have it.
            logs: whether Megatron logs this iteration; it always logs the first of a run.
        """
        self._report_norm()
        late = [chunk for chunk in self._chunks if self._reductions.is_running(chunk)]
        reduced = [chunk for chunk in self._chunks if chunk not in late]
        if not self._may_be_late(optimizer, reduced, late):
            self._num_whole += 1
            self._reductions.count_deferred(is_late=False)
            self._reductions.start_rest()
            for chunk in late:
                self._reductions.wait_for(chunk)
            return whole_step()
        self._is_logged = logs or not (self._num_late or self._num_whole)
        self._report = report
        self._num_late += 1
        self._reductions.count_deferred(is_late=True)
        self._step = PartialStep(optimizer, iteration, self._alone)
        if parameters := [p for chunk in reduced for p in chunk.parameters()]:
            self._step.take(parameters)
        self._due = set(late)
        return True, None, None

    def defer_scaling(self, chunk: Any, factor: Any) -> bool:
        """Return True if a chunk's gradients are scaled once reduced, and not by the caller now."""
        return self._reductions.defer_scaling(chunk, factor)

    def defer_zeroing(self, chunk: Any) -> bool:
        """Return True if a chunk's gradients are zeroed by its step, which is due."""
        if chunk in self._due:
            return True
        self._reductions.wait_for(chunk)  # the iteration is given up or run again
        return False

    def drain(self) -> None:
        """Settle everything: parameters are then those of the last iteration, for all to read."""
        self._reductions.start_rest()
        for chunk in self._chunks:
            self.finish_step(chunk)
        self._report_norm()

    def close(self, error: BaseException | None) -> None:
        """Drain at the end of a run.

        Not after an error, when there may be nobody left to wait for, nor where a rank leaves
        within an iteration: the others go on with it.
        """
        if not self._chunks or self._in_iteration or error is not None:
            return
        self.drain()
        for chunk in self._chunks:
            self._reductions.wait_for(chunk)
        log_single_rank(
            logger,
            logging.INFO,
            "steps: %s reached into the next iteration, %s waited for all gradients",
            self._num_late,
            self._num_whole,
        )

    def _may_be_late(self, optimizer: Any, reduced: Sequence[Any], late: Sequence[Any]) -> bool:
        """Whether the step is sure to be neither clipped nor skipped."""
        if self._norm_bound is None:
            return not is_conditional(optimizer.config)
        scaling = self._reductions.scaling
        self._norm_bound.add_reduced(reduced, late, self._reduced_in_iteration, scaling)
        self._bound = self._norm_bound.total(optimizer.get_loss_scale().item(), scaling)
        return self._bound.allows_late_steps(optimizer.config)

    def _connect(self, chunks: Sequence[Any], groups: ProcessGroupCollection) -> None:
        """Make the process groups."""
        rank_groups = everyones_groups(
            {ranks_of(g.data_parallel_group) for g in bucket_groups(*chunks)}
        )
        self._reduced_in_iteration = reduced_in_iteration(chunks, groups)
        self._reductions.connect_groups(chunks, self._reduced_in_iteration, rank_groups, groups)
        if self._bounded:
            device = next(chunks[0].parameters()).device
            self._norm_bound = NormBound(rank_groups, chunks, device, self._timeout)
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._chunks = chunks

    def _report_norm(self) -> None:
        """Tell the norm of the gradients of an iteration, as soon as all are known."""
        assert not self._due, "a chunk ran no forward since its step became due"
        if self._step is None:
            return
        norm = self._step.grad_norm()
        if self._is_logged:
            known = "" if self._bound is None else f", bound {self._bound.norm:.6g}"
            iteration = self._step.iteration
            log_single_rank(
                logger, logging.INFO, "grad norm of iteration %s: %s%s", iteration, norm, known
            )
        if self._report is not None:
            self._report(norm)
        self._step = None
