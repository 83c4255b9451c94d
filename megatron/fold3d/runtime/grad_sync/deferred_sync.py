"""DP.sync that reaches into the next iteration: the paper's free split (Algorithm 2).

A part of each model chunk's gradients is reduced as soon as its last backward is done. The rest
follows where the plan says, in the order in which the next forward needs the chunks. The first
chunk's rest starts when all backwards are done; that of the others starts when the next iteration
begins. They do not start earlier, because Megatron runs small blocking collectives between two
iterations, for norms and losses, and these would share the links with them.

Right before a chunk's first forward, this rank waits for the chunk's gradients and takes the
optimizer step of their iteration. `DeferredReductions` does the reductions; this module the steps.

    segments 0 and 1 of a rank; a is the backward share of a segment's DP.sync, b the rest

    compute    .. 1B ..┐ .. 0B ..┐ sums, losses │┌ 0STEP  .. 0F ..  ┌ 1STEP  .. 1F ..
                       │         │              ││                  │
    DP.sync            └── 1a    └── 0a ── 0b ──│┘                  │
                                                └── 1b ─────────────┘
               iteration i                      │ iteration i + 1

With the distributed optimizer each reduction is a reduce-scatter, each step updates this rank's
shards, and an all-gather of the chunk's parameters follows. The rest of a chunk's reduce-scatters
starts behind the all-gather of the chunk before, in the same process group. So the network carries
data in the order in which the forward needs it.

    DP.sync            ── 0a ── 0b ─┬─ gather 0 ── 1b ─┬─ gather 1 ── 2b ─
    compute                         step 0   .. 0F ..  step 1 .. 0F .. │ 1F

If an iteration had to wait for all gradients, the next one starts all of its DP.sync with its
backwards. It will most likely have to wait as well, and then deferring gradients only costs time.

Keeps one invariant: from the start of a chunk's reduction until its step, no other code reads the
chunk's gradients, adds to them or zeroes them, or reads its parameters. Gradients that Megatron
changes or reads at the end of the iteration are reduced by then. These are `reduced_in_iteration`,
or all gradients if the step depends on their values.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import log_single_rank

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.runtime.grad_sync.bucket_groups import (
    bucket_groups,
    everyones_reducing_groups,
    is_sharded,
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
"""The result of Megatron's ``step``: update successful, gradient norm, zeros in the gradients."""

Report = Callable[[float], None]
"""Called on all ranks with the norm of an iteration's gradients, once all of them are reduced."""


class DeferredSync:
    """Reductions and optimizer steps of one rank's model chunks, over all iterations.

    A chunk's step becomes *due* when Megatron asks for the optimizer step. Megatron may run an
    iteration again, which it decides before that; its reductions are then dropped.

    Args:
        backward_share: the part of every segment's DP.sync that starts with its backward.
        slice_bytes: the largest slice that is reduced at once. More urgent communication waits
            for the slice in flight.
        bounded: whether steps may be clipped or skipped. A step is then deferred only if a bound
            on the gradient norm rules both out.
        timeout: the timeout of a reduction.
        communicator: starts the slices; without one they start at once.
        auto: measures some iterations and from then on decides the share of each segment.
        recorder: the recorder of the trace, if there is one.
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
        )

        # Known with the first iteration.
        self._chunks: Sequence[Any] = ()
        self._reduced_in_iteration: AbstractSet[torch.nn.Parameter] = frozenset()
        self._norm_bound: NormBound | None = None
        self._alone: dist.ProcessGroup | None = None
        self._in_iteration = False
        self._is_sharded = False
        self._gathers_later = False  # parameters: not within the optimizer's step

        # Of the step that Megatron asked for last.
        self._step: PartialStep | None = None
        self._report: Report | None = None
        self._is_logged = False  # its norm
        self._bound: Bound | None = None
        self._was_late = not bounded  # a young model's gradients are large: expect to wait
        self._due: set[Any] = set()  # chunks
        self._noted: set[Any] = set()  # chunks whose norms of this iteration are bounded
        self._num_late = self._num_whole = 0  # of all steps
        self._num_normed = self._num_clipped = 0  # of those that deferred nothing

    def prepare(
        self,
        chunks: Sequence[torch.nn.Module],
        groups: ProcessGroupCollection,
        sums: Mapping[Any, Action],
    ) -> None:
        """Begin an iteration; all ranks of the job call this together.

        Args:
            chunks: the model chunks of this rank.
            groups: Megatron's process groups.
            sums: by chunk, the plan's name for the sum of all of its gradients.
        """
        self._reductions.sums = sums
        self._in_iteration = True
        self._noted.clear()
        if not self._chunks:
            self._connect(chunks, groups)

    def begin_iteration(self, num_segments: int) -> tuple[float, ...]:
        """Return the share of each segment that starts with its backward in the next iteration.

        All replicas of a stage call this together, once for each iteration that carries DP.sync.
        """
        return self._reductions.begin_iteration(num_segments, whole=not self._was_late)

    def set_shares(self, shares: Sequence[float]) -> None:
        """From the next iteration on, start ``shares[segment]`` of DP.sync with the backward.

        All replicas of a stage must be given the same shares.
        """
        self._reductions.set_shares(shares)

    @property
    def waited(self) -> bool:
        """Whether the last step of an iteration that deferred something waited for all gradients.

        It is the same on all ranks.
        """
        return not self._was_late

    @property
    def clipped(self) -> float:
        """The share of the steps that deferred nothing whose gradients were clipped.

        It is the same on all ranks. Each of them would have waited for all gradients.
        """
        return self._num_clipped / max(1, self._num_normed)

    @property
    def has_due(self) -> bool:
        """Whether steps of the last iteration are still to be taken."""
        return bool(self._due)

    def take(self, chunk: Any, unfinished: Collection[torch.Tensor] = ()) -> None:
        """Take what is complete of a chunk's gradients; `start_until` then starts it.

        Args:
            chunk: the model chunk.
            unfinished: the parameters whose gradients are not complete.
        """
        pieces = self._reductions.take(chunk, unfinished)
        if self._norm_bound is not None and pieces:
            more = chunk in self._noted
            self._norm_bound.add(self._chunks.index(chunk), pieces, more=more)
            self._noted.add(chunk)

    def start_until(self, chunk: Any, end: int) -> None:
        """Start what was taken before ``end`` thousandths of a chunk, if that is in flight."""
        self._reductions.start_until(chunk, end)

    def keep(self, chunk: Any) -> None:
        """Start to reduce what Megatron reads when the iteration ends."""
        self._reductions.keep(chunk)

    def finish_kept(self, chunk: Any) -> None:
        """Wait for what `keep` has started."""
        self._reductions.finish_kept(chunk)

    def finish_backward(self) -> None:
        """Note that all backwards are done."""
        self._in_iteration = False

    def finish_step(self, chunk: Any) -> bool:
        """If a chunk's step is due, wait for its gradients, take the step and zero them.

        Returns:
            Whether the step was due.
        """
        if chunk not in self._due:
            assert not self._reductions.is_running(chunk), "its gradients were not waited for"
            return False
        assert self._step is not None
        self._reductions.wait_for(chunk)
        self._step.take(chunk.parameters())
        self._due.remove(chunk)
        chunk.zero_grad_buffer()
        return True

    def gather(self, chunk: Any) -> None:
        """Start to gather a stepped chunk's parameters.

        Without the distributed optimizer there is nothing to gather.
        """
        if self._is_sharded:
            self._reductions.gather(chunk)

    def forwards_before_gathers(self, num_microbatches: int, num_segments: int) -> tuple[int, ...]:
        """Return, by segment, how many forwards of the one before overlap what is left of it.

        The other forwards of the segment before overlap the segment's all-gather.
        """
        if not self._due:
            return (0,) * num_segments
        return self._reductions.forwards_before_gathers(num_microbatches)

    def step(
        self,
        optimizer: Any,
        iteration: int,
        whole_step: Callable[[], Outcome],
        *,
        report: Report | None = None,
        logs: bool = True,
    ) -> Outcome:
        """Step the chunks whose gradients are reduced; the steps of the others become due.

        `finish_step` takes the due steps later, with the settings of this iteration. If the result
        could differ from Megatron's, wait for all gradients and call ``whole_step`` instead.

        Args:
            optimizer: Megatron's optimizer.
            iteration: the number of the iteration that this step belongs to.
            whole_step: Megatron's own step, of all parameters at once.
            report: is called with the gradient norm if the returned outcome lacks it.
            logs: whether Megatron logs this iteration; it always logs the first of a run.
        """
        self._report_norm()
        late = [chunk for chunk in self._chunks if self._reductions.is_running(chunk)]
        reduced = [chunk for chunk in self._chunks if chunk not in late]
        if not late:  # nothing was deferred
            outcome = whole_step()
            self._note_norm(optimizer.config.clip_grad, outcome)
            return outcome
        if not self._may_be_late(optimizer, reduced, late):
            self._num_whole += 1
            self._was_late = False
            self._reductions.count_deferred(is_late=False)
            self._reductions.start_left()
            for chunk in late:
                self._reductions.wait_for(chunk)
            return whole_step()
        self._is_logged = logs or not (self._num_late or self._num_whole)
        self._report = report
        self._num_late += 1
        self._was_late = True
        self._reductions.count_deferred(is_late=True)
        self._step = PartialStep(optimizer, iteration, self._alone)
        if parameters := [p for chunk in reduced for p in chunk.parameters()]:
            self._step.take(parameters)
        if self._is_sharded and not self._gathers_later:
            for chunk in reduced:
                self._reductions.gather(chunk)
        self._due = set(late)
        return True, None, None

    def defer_scaling(self, chunk: Any, factor: Any) -> bool:
        """Take over the scaling of gradients that are still being reduced.

        Returns True if the chunk will be scaled once reduced, False if the caller must scale it.
        """
        return self._reductions.defer_scaling(chunk, factor)

    def defer_zeroing(self, chunk: Any) -> bool:
        """Return True if a chunk's due step will zero its gradients, so the caller must not."""
        if chunk in self._due:
            return True
        self._reductions.wait_for(chunk)  # the iteration is given up or run again
        return False

    def drain(self) -> None:
        """Finish all reductions and due steps; the parameters are then up to date."""
        self._reductions.start_left()
        for chunk in [chunk for chunk in self._chunks if chunk in self._due]:
            self.finish_step(chunk)
            if self._is_sharded:
                chunk.start_param_sync(force_sync=True)
        self._report_norm()

    def close(self, error: BaseException | None) -> None:
        """Drain at the end of a run.

        Do nothing after an error, since other ranks may be gone. Do nothing either if this rank
        leaves within an iteration, since the others continue it.
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
        """True if the step is certain to be neither clipped nor skipped."""
        if self._norm_bound is None:
            return not is_conditional(optimizer.config)
        scaling = self._reductions.scaling
        self._norm_bound.add_reduced(reduced, late, self._reduced_in_iteration, scaling)
        self._bound = self._norm_bound.total(optimizer.get_loss_scale().item(), scaling)
        return self._bound.allows_late_steps(optimizer.config)

    def _note_norm(self, clip_grad: float, outcome: Outcome) -> None:
        """Count a step that deferred nothing, if it was taken and its norm is known."""
        taken, norm, _ = outcome
        if taken and norm is not None:
            self._num_normed += 1
            self._num_clipped += bool(0 < clip_grad < norm)

    def _connect(self, chunks: Sequence[Any], groups: ProcessGroupCollection) -> None:
        """Make the process groups."""
        rank_groups = everyones_reducing_groups(bucket_groups(*chunks))
        self._is_sharded = any(map(is_sharded, bucket_groups(*chunks)))
        self._gathers_later = bool(chunks[0].ddp_config.overlap_param_gather)
        self._reduced_in_iteration = reduced_in_iteration(chunks, groups)
        self._reductions.connect_groups(chunks, self._reduced_in_iteration, groups)
        if self._bounded:
            device = next(chunks[0].parameters()).device
            self._norm_bound = NormBound(rank_groups, chunks, device, self._timeout)
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self._chunks = chunks

    def _report_norm(self) -> None:
        """Log and report the gradient norm of the last deferred step, now that it is complete."""
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
