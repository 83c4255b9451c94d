"""DP.sync that reaches into the next iteration: the paper's free split (Algorithm 2).

A part of each model chunk's gradients is reduced as soon as its last backward is done. The rest
follows where the plan says, in the order in which the next forward needs the chunks. The first
chunk's rest starts when all backwards are done; other chunks' rests start when the next iteration
begins. They do not start earlier, because between two iterations Megatron runs small blocking
collectives, for norms and losses, which would have to share the links.

Right before a chunk's first forward, this rank waits for the chunk's gradients and takes the
optimizer step of their iteration. `StageGradients` reduces, this module steps.

    segments 0 and 1 of a rank; a is the backward share of a segment's DP.sync, b the rest

    compute    .. 1B ..┐ .. 0B ..┐ sums, losses │┌ 0STEP  .. 0F ..  ┌ 1STEP  .. 1F ..
                       │         │              ││                  │
    DP.sync            └── 1a    └── 0a ── 0b ──│┘                  │
                                                └── 1b ─────────────┘
               iteration i                      │ iteration i + 1

With the distributed optimizer each reduction is a reduce-scatter, each step updates this rank's
shards, and an all-gather of the chunk's parameters follows. The rest of a chunk's reduce-scatters
starts after the all-gather of the previous chunk, in the same process group. So the network carries
data in the order in which the forward needs it.

    DP.sync            ── 0a ── 0b ─┬─ gather 0 ── 1b ─┬─ gather 1 ── 2b ─
    compute                         step 0   .. 0F ..  step 1 .. 0F .. │ 1F

A run that may clip or skip steps has two plans: `DueSteps.is_free` tells when DP.sync is carried
(docs/architecture.md, Steps that may be clipped or skipped).

Keeps one invariant: from the start of a chunk's reduction until its step, no other code reads the
chunk's gradients, adds to them or zeroes them, or reads its parameters. Gradients that Megatron
changes or reads at the end of the iteration are reduced by then. These are `reduced_in_iteration`,
or all gradients if the step depends on their values.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.utils import log_single_rank

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.ir import WHOLE, Action, Op, carried
from megatron.fold3d.plan.ops import SUM_OPS
from megatron.fold3d.runtime.events import UNHEARD, Events
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, connect, group_of
from megatron.fold3d.runtime.grad_sync.norm_bound import Bound, NormBound, is_conditional
from megatron.fold3d.runtime.grad_sync.partial_step import PartialStep
from megatron.fold3d.runtime.grad_sync.stage_gradients import (
    UNCUT,
    StageGradients,
    reduced_in_iteration,
)

if TYPE_CHECKING:
    from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator

logger = logging.getLogger(__name__)

_MOST_NEEDED = 64  # steps that are not clipped, before one may be late

Outcome = tuple[bool, float | None, int | None]
"""The result of Megatron's ``step``: update successful, gradient norm, zeros in the gradients."""

Report = Callable[[float], None]
"""Called on all ranks with the norm of an iteration's gradients, once all of them are reduced."""


class DueSteps(Feature):
    """What one rank's model chunks reduce, and when they are stepped, over all iterations.

    A chunk's step becomes *due* when Megatron asks for the optimizer step. Megatron may run an
    iteration again, which it decides before that; its reductions are then dropped. Where steps may
    be clipped or skipped, one is deferred only if a bound on the gradient norm rules both out.

    Args:
        communicator: starts the slices, so that what is more urgent waits for the slice in flight
            alone; without one they start at once.

    Attributes:
        is_free: whether the next iteration may leave steps due; the same on all ranks.
    """

    evaluates = True  # it takes due steps before
    preparing = "STEP before evaluation"

    def __init__(
        self,
        config: Fold3DConfig,
        communicator: "PreemptiveCommunicator | None" = None,
        recorder: Events = UNHEARD,
    ) -> None:
        self.is_free = not config.clips_or_scales  # a young model's gradients are large
        self._config = config
        self._communicator, self._recorder = communicator, recorder

        # Known with the first iteration.
        self._gradients: dict[Any, StageGradients] = {}  # by chunk
        self._reduced_in_iteration: AbstractSet[torch.nn.Parameter] = frozenset()
        self._norm_bound: NormBound | None = None
        self._in_iteration = False

        # Of the iteration that runs.
        self._shares: tuple[float, ...] = ()  # by segment, of its sum; empty is all
        self._scaling: dict[Any, Any] = {}  # by chunk that is still being reduced

        # Of the step that Megatron asked for last.
        self._step: PartialStep | None = None
        self._tell: Report = lambda _norm: None
        self._bound: Bound | None = None
        self._num_calm = 0  # of the latest steps: in a row neither clipped nor skipped
        self._needed = 1  # of these, before a step may be late
        self._due: set[Any] = set()  # chunks
        self._num_late = self._num_whole = 0  # of all steps

    def decide(self, job: Job, rank: int) -> Job:
        """Return the job of a free iteration, or of an iteration that may be clipped."""
        if not self.is_free:
            job = job.in_iteration
        self._shares = job.shares[rank :: job.num_ranks]
        return job

    @property
    def has_due(self) -> bool:
        """Whether steps of the last iteration are still to be taken."""
        return bool(self._due)

    def prepare(self, iteration: Iteration) -> None:
        """Connect in the first iteration; in one that carries nothing, take all due steps."""
        if not carried(iteration.program):
            self.take_all()
            return
        self._in_iteration = True
        if not self._gradients:
            self._connect(iteration)
        if self._norm_bound is not None:
            self._norm_bound.clear()

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return handlers that sum, step and gather what is carried; all else is DDP's."""
        late = carried(iteration.program)
        plan_gathers = any(action.op is Op.ALL_GATHER for action in iteration.program)
        stepped: set[int] = set()  # stages; what follows is of this iteration

        def chunk(action: Action) -> Any:
            return iteration.chunks[iteration.segment(action)]

        def reduce(action: Action) -> None:
            if action.stage not in late:
                inner[action.op](action)
                return
            if action.stage in stepped:
                self._complete(chunk(action), iteration.unfinished.get(action.stage, ()))
            self._gradients[chunk(action)].start_until(action.end)

        def keep(action: Action) -> None:
            inner[Op.REDUCE_KEPT](action)
            self._complete(chunk(action))
            self._gradients[chunk(action)].keep()

        def step(action: Action) -> None:
            if action.stage in late:
                stepped.add(action.stage)
                if self.finish_step(chunk(action)) and not plan_gathers:
                    self._gather(chunk(action))
            inner[Op.STEP](action)

        def gather(action: Action) -> None:
            if action.stage in late and iteration.hooks_wait:
                self._gather(chunk(action))
            else:
                inner[Op.ALL_GATHER](action)

        return {
            **dict.fromkeys(SUM_OPS, reduce),
            Op.REDUCE_KEPT: keep,
            Op.FINALIZE: lambda action: self._gradients[chunk(action)].finish_kept(),
            Op.STEP: step,
            Op.ALL_GATHER: gather,
        }

    def drain(self, iteration: Iteration) -> None:
        """Note that an iteration's gradients are Megatron's."""
        self._in_iteration = False

    def _complete(self, chunk: Any, unfinished: Collection[torch.Tensor] = ()) -> None:
        """Note which of a chunk's gradients are complete: all but those of ``unfinished``."""
        pieces = self._gradients[chunk].complete(unfinished)
        if self._norm_bound is not None:
            self._norm_bound.add([*self._gradients].index(chunk), pieces)

    def finish_step(self, chunk: Any) -> bool:
        """If a chunk's step is due, wait for its gradients, take the step and zero them.

        Returns:
            Whether the step was due.
        """
        if chunk not in self._due:
            assert not self._is_summed(chunk), "its gradients were not waited for"
            return False
        assert self._step is not None
        self._wait_for(chunk)
        self._step.take(chunk.parameters())
        self._due.remove(chunk)
        chunk.zero_grad_buffer()
        return True

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
            iteration: the number of the iteration that this step belongs to.
            whole_step: Megatron's own step, of all parameters at once.
            report: is called with the gradient norm if the returned outcome lacks it.
            logs: whether Megatron logs this iteration; it always logs the first of a run.
        """
        self._report_norm()
        late = [chunk for chunk in self._gradients if self._is_summed(chunk)]
        reduced = [chunk for chunk in self._gradients if chunk not in late]
        if not (late and self._may_be_late(optimizer, reduced, late)):
            self._num_whole += 1
            self._start_left()
            for chunk in late:
                self._wait_for(chunk)
            outcome = whole_step()
            self._choose_next(optimizer.config, outcome, had_to_wait=bool(late))
            return outcome
        known = "" if self._bound is None else f", bound {self._bound.norm:.6g}"
        is_logged = logs or not (self._num_late or self._num_whole)

        def tell(norm: float) -> None:
            if is_logged:
                told = iteration, norm, known
                log_single_rank(logger, logging.INFO, "grad norm of iteration %s: %s%s", *told)
            if report is not None:
                report(norm)

        self._tell = tell
        self._num_late += 1
        self._needed = max(1, self._needed // 2)
        shares = self._shares or (1.0,) * len(self._gradients)
        of_chunks = zip(self._gradients.values(), shares, strict=True)
        self._count_rest(sum((1 - share) * its.num_bytes for its, share in of_chunks))
        self._step = PartialStep(optimizer)
        if parameters := [p for chunk in reduced for p in chunk.parameters()]:
            self._step.take(parameters)
        if not self._config.job.gathers_params:  # else not within the optimizer's step
            for chunk in reduced:
                self._gather(chunk)
        self._due = set(late)
        return True, None, None

    def scale(self, upstream: Callable[..., None], chunk: Any, factor: Any) -> None:
        """Scale a chunk's gradients as ``upstream`` does; once reduced, if they still are."""
        if self._is_summed(chunk):
            self._scaling[chunk] = factor
        else:
            upstream(chunk, factor)

    def zero(self, upstream: Callable[..., None], chunk: Any) -> None:
        """Zero a chunk's gradients as ``upstream`` does, unless its due step will."""
        if chunk not in self._due:
            self._wait_for(chunk)  # the iteration is given up or run again
            upstream(chunk)

    def take_all(self) -> None:
        """Finish all reductions and due steps; the parameters are then up to date."""
        self._start_left()
        for chunk in [chunk for chunk in self._gradients if chunk in self._due]:
            self.finish_step(chunk)
            if self._config.job.steps_shards:
                chunk.start_param_sync(force_sync=True)
        self._report_norm()

    def close(self, error: BaseException | None) -> None:
        """Drain at the end of a run.

        Do nothing after an error, since other ranks may be gone. Do nothing either if this rank
        leaves within an iteration, since the others continue it.
        """
        if self._in_iteration or error is not None:
            return
        self.take_all()
        for chunk in self._gradients:
            self._wait_for(chunk)
        if self._num_late or self._num_whole:
            log_single_rank(
                logger,
                logging.INFO,
                "steps: %s reached into the next iteration, %s waited for all gradients",
                self._num_late,
                self._num_whole,
            )

    def _gather(self, chunk: Any) -> None:
        """Start to gather a stepped chunk's parameters, if they are sharded."""
        if self._config.job.steps_shards:
            self._gradients[chunk].gather()

    def _may_be_late(self, optimizer: Any, reduced: Sequence[Any], late: Sequence[Any]) -> bool:
        """True if the step is certain to be neither clipped nor skipped."""
        if self._norm_bound is None:
            return not is_conditional(optimizer.config)
        scaling = next(iter(self._scaling.values()), 1.0)  # all chunks have the same
        self._norm_bound.add_reduced(reduced, late, self._reduced_in_iteration, scaling)
        self._bound = self._norm_bound.total(optimizer.get_loss_scale().item(), scaling)
        return self._bound.allows_late_steps(optimizer.config)

    def _choose_next(self, config: Any, outcome: Outcome, *, had_to_wait: bool) -> None:
        """Decide, behind a whole step, whether the next iteration may leave steps due."""
        taken, norm, _ = outcome
        if norm is None:
            is_calm = taken and not is_conditional(config)
        else:
            is_calm = taken and Bound(norm, peak=0.0).allows_late_steps(config)
        self._num_calm = self._num_calm + 1 if is_calm and not had_to_wait else 0
        if had_to_wait:
            self._count_rest(0)
            self._needed = min(2 * self._needed, _MOST_NEEDED)
        self.is_free = self._num_calm >= self._needed

    def _connect(self, iteration: Iteration) -> None:
        """Make the process groups."""
        chunks: Sequence[Any] = iteration.chunks
        self._reduced_in_iteration = reduced_in_iteration(chunks, iteration.groups)
        ours = connect(map(group_of, bucket_groups(*chunks)), iteration.device)
        if self._communicator is not None:
            ours = {ranks: self._communicator.group(group) for ranks, group in ours.items()}
        slice_bytes = UNCUT if self._config.choice.slices else self._config.slice_bytes
        cut = self._reduced_in_iteration, slice_bytes, ours
        for segment, chunk in enumerate(chunks):
            stage = segment * iteration.plan.num_ranks + iteration.rank
            self._gradients[chunk] = StageGradients(chunk, stage, self._recorder, *cut)
        if self._config.clips_or_scales:
            self._norm_bound = NormBound(chunks, iteration.device)

    def _is_summed(self, chunk: Any) -> bool:
        """True while gradients of a chunk are being summed, and are not waited for."""
        return chunk in self._gradients and self._gradients[chunk].is_running

    def _start_left(self) -> None:
        """Start all that is complete and was not started, lowest chunk first."""
        for gradients in self._gradients.values():
            gradients.start_until(WHOLE)

    def _wait_for(self, chunk: Any) -> None:
        """Wait for a chunk's reduction, if one is in flight, then apply a deferred scaling."""
        if chunk in self._gradients:
            self._gradients[chunk].wait()
        if (factor := self._scaling.pop(chunk, None)) is not None:
            chunk.scale_gradients(factor)

    def _count_rest(self, num_bytes: float) -> None:
        """Record in the trace which share of the gradients is reduced in the next iteration."""
        buckets = (b for group in bucket_groups(*self._gradients) for b in group.buckets)
        if all_bytes := sum(bucket.grad_data.nbytes for bucket in buckets):
            self._recorder.count("deferred_grad_sync_share", num_bytes / all_bytes)

    def _report_norm(self) -> None:
        """Log and report the gradient norm of the last deferred step, now that it is complete."""
        assert not self._due, "a chunk ran no forward since its step became due"
        if self._step is not None:
            self._tell(self._step.grad_norm())
        self._step = None
