"""``--schedule auto`` and other values ``auto``: try what is predicted, keep the fastest.

    iteration  1       2         3 ..      n      n+1    n+2      n+3    n+4    n+5      n+6    ..
               starts  measured  searched  timed  timed  changes  timed  timed  changes  timed
    runs       the first choice ───────────────────────── second ─────────────── third ─────────

The search runs in a process beside the first rank, while training continues.

The first choice is stock's order, or the choice of the flags without the values that they leave to
``auto``. An iteration is timed from its first action to the end of its optimizer step, so
evaluations and checkpoints are not counted. If an iteration's step is skipped, or the iteration is
run again, it does not count and the next iteration takes its place. Each number of micro-batches
has its own choice.

If DP.sync reaches into the next iteration, a step that may be clipped has to wait for all gradients
and gains nothing. So such a choice is tried and runs only while `DueSteps.is_free`. In between the
fastest other choice runs.

Keeps one invariant: all ranks choose in the same iteration, from the same numbers.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.plan.ops import COMPUTE_OPS, WEIGHT_OPS
from megatron.fold3d.plan.passes.weight_grads import split_in_place
from megatron.fold3d.policy.measured_times import MeasuredTimes
from megatron.fold3d.policy.predicted import Predicted, Predictions
from megatron.fold3d.policy.shard_order import started_shares
from megatron.fold3d.runtime.agreement import slowest
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration
from megatron.fold3d.runtime.measure.run_recorder import RunRecorder
from megatron.fold3d.runtime.measure.timing import clock
from megatron.fold3d.runtime.trial import TIMED, Trial

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.coded_sums import CodedSums
    from megatron.fold3d.runtime.grad_sync.delta_gather import DeltaGather
    from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps

logger = logging.getLogger(__name__)

MEASURED, SEARCHES = 2, 3  # training iterations
_MOST_REPEATS = 3  # of an iteration before which due steps were taken, as before an evaluation
_WORTH_TELLING = 0.98  # a prediction, of the run's own


class AutoSchedule(Feature):
    """Measures, and chooses how a run's iterations are computed, summed and stepped.

    Args:
        search: begins a search: `SearchProcess`, which this room may not import.
        due: takes the steps that reach into the next iteration, if the run may have any.
        delta: counts the bytes of all-gathers, if parameters are coded.
        sums: counts the bytes of reduce-scatters, if gradients are coded.
    """

    preparing = "the measurement of its links"

    def __init__(
        self,
        config: Fold3DConfig,
        search: Callable[..., Any],
        *,
        due: "DueSteps | None" = None,
        delta: "DeltaGather | None" = None,
        sums: "CodedSums | None" = None,
    ) -> None:
        self._config, self._search = config, search
        self._due = due
        self._device = torch.device(config.device)
        self._recorder = RunRecorder(self._device, delta, sums)
        self._trials: dict[int, Trial] = {}
        self._trained = 0  # training iterations so far
        self._iterations = 0
        self._size = 0  # micro-batches of the iterations that `_iterations` counts
        self._index = 0  # of the choice that runs
        self._first: Job | None = None  # the job of the flags
        self._chooses_all = config.choice.order == "auto"

        # While a search goes on: what was measured, and the search itself on the first rank.
        self._times: MeasuredTimes | None = None
        self._running: Any = None

        # Of the latest training iteration.
        self._passed_s: Callable[[], float] | None = None  # since it began, if it is timed
        self._took_s: float | None = None  # None if its step was not taken
        self._follows_itself = False  # it runs the same choice as the one before
        self._is_steady = True

    @property
    def _is_free(self) -> bool:
        return self._due is None or self._due.is_free

    def decide(self, job: Job, rank: int) -> Job:
        """Count the previous iteration; return the job that runs now."""
        self._count()
        size, before = job.num_microbatches, (self._size, self._index)
        if size != self._size:
            self._size = size
            self._iterations = SEARCHES if size in self._trials else 0
            self._recorder.clear()
            self._end_search()
        chosen = self._now(job)
        self._first = job
        self._follows_itself = before == (self._size, self._index)
        return chosen

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return handlers that time the computations of the second training iteration."""
        is_measured = self._iterations == MEASURED
        return self._recorder.handlers(iteration, inner) if is_measured else {}

    def prepare(self, iteration: Iteration) -> None:
        """Search from the third training iteration on; start the clock of a timed iteration."""
        self._iterations += 1
        if self._iterations == SEARCHES:
            self.search(self._recorder.agreed(iteration), iteration)
        if self._times is not None:
            self.receive()
        self._trained += 1
        self._passed_s = self._took_s = None
        trial = self._trials.get(self._size)
        if trial is not None and trial.untimed(free=self._is_free):
            carries = trial.choices[self._index].choice.carries
            self._is_steady = not carries or self._due is None or self._due.has_due
            self._passed_s = clock(self._device)

    def step(self, take: Callable[[], Any]) -> Any:
        """Take Megatron's optimizer step; note its time and the time of the iteration that it ends.

        The second iteration's step is timed, unless stages are stepped by actions of their own.

        Args:
            take: returns a tuple, first whether Megatron took the step, which it may skip.
        """
        is_measured = self._iterations == MEASURED and not self._config.choice.carries
        step_s = clock(self._device) if is_measured else None
        outcome = take()
        if outcome[0] and step_s is not None:
            self._recorder.step_s = step_s()
        if outcome[0] and self._passed_s is not None:
            self._took_s = self._passed_s()
        return outcome

    def close(self, error: BaseException | None) -> None:
        """End the search; name the running choice in an error that it may have caused."""
        self._end_search()
        if self._index and isinstance(error, torch.OutOfMemoryError | PlanError):
            choices = self._trials[self._size].choices
            error.add_note(
                f"{self._config.measuring_flag} was running {choices[self._index].choice}; "
                f"give --schedule {choices[0].choice} to train without it"
            )

    def search(self, times: MeasuredTimes, iteration: Iteration) -> None:
        """Let the first rank begin to search the choices worth trying."""
        self._times = times
        if dist.get_rank() != 0:
            return
        config, job = self._config, self._first
        assert job is not None, "no iteration has begun"
        if self._chooses_all:
            job = replace(job, choice=replace(job.choice, order=job.choice.schedule))
        if job.choice.fills_gaps:
            job = replace(job, order=job.computed.select(COMPUTE_OPS - WEIGHT_OPS))
        num_layers = sum(isinstance(m, TransformerLayer) for m in iteration.chunks[-1].modules())
        self._running = self._search(
            times=times,
            job=job,
            free=config.free(),
            frees_order=self._chooses_all,
            frees_ahead="ahead" in config.auto,
            tied=config.ties_embeddings,
            keeps_forwards=config.keeps_forwards,
            preemptive=config.preemptive_comm,
            shard_shares=started_shares(num_layers, config.num_replicas),
            # Steps that may be clipped come after an all-reduce: nothing else carries steps.
            shards=self._chooses_all and not self._is_free,
        )

    def receive(self) -> None:
        """Let the first rank broadcast the choices that its search has found, once it has ended."""
        found: list[Any] = [self._running.answer() if self._running is not None else None]
        dist.broadcast_object_list(found, src=0)
        if found[0] is None:
            return
        self._trials[self._size] = trial = Trial(found[0].choices, self._times)
        self._end_search()
        self._advise(found[0])
        self._tell(trial)

    def _end_search(self) -> None:
        if self._running is not None:
            self._running.close()
        self._running = self._times = None

    def _advise(self, found: Predictions) -> None:
        """Log advice before the choices are tried."""
        if dist.get_rank() != 0:
            return
        if found.sharded is not None:
            _advise_sharding(found.choices, found.sharded)
        cuts = [
            one.choice.carries
            or one.choice.where(optimizer="replicated")
            or (self._config.job.reduces_early and one.choice.splits)
            for one in found.choices
        ]
        codes = self._config.coded_grad_reduce != "off"
        if self._chooses_all and self._config.num_replicas > 2 and (codes or any(cuts)):
            logger.info(
                "--schedule auto tries what adds up the gradients of %s replicas in another "
                "order: results may differ from stock's by rounding. --deterministic-mode "
                "keeps stock's order",
                self._config.num_replicas,
            )

    def _now(self, first: Job) -> Job:
        """Return the job of the iteration that begins: ``first`` until the search has ended."""
        trial, number = self._trials.get(self._size), self._iterations + 1
        if trial is not None:
            self._index = trial.current(free=self._is_free)
            return trial.choices[self._index].job
        self._index = 0
        splits = "wgrad" in self._config.auto or self._config.apart
        if number == MEASURED and splits and not first.computed.has(*WEIGHT_OPS):
            return replace(first, order=split_in_place(first.computed))
        return first

    def _count(self) -> None:
        """Note the time of an iteration that has ended; compare choices after the last one."""
        trial, index, took_s = self._trials.get(self._size), self._index, self._took_s
        self._took_s = None
        if trial is None or took_s is None or not self._follows_itself:
            return
        had_to_wait = trial.choices[index].choice.carries and not self._is_free
        if had_to_wait or len(trial.times_s[index]) == TIMED:
            return
        trial.repeats += 1
        if not (self._is_steady or trial.repeats > _MOST_REPEATS):
            return
        trial.times_s[index].append(took_s)
        if len(trial.times_s[index]) < TIMED:
            return
        trial.repeats = 0
        (trial.measured_s[index],) = slowest([min(trial.times_s[index])], self._device)
        self._tell(trial)

    def _tell(self, trial: Trial) -> None:
        """Log the kept choice, unless other choices still have to be timed."""
        if dist.get_rank() == 0 and not trial.untimed(free=self._is_free):
            flag, after = self._config.measuring_flag, self._trained
            logger.info("%s", trial.table(flag, free=self._is_free, after=after))


def _advise_sharding(predicted: Sequence[Predicted], sharded: Predicted) -> None:
    """Log that the distributed optimizer would be faster where most steps are clipped.

    Args:
        sharded: stock's order with the distributed optimizer.
    """
    own_s = min(one.seconds for one in predicted if not one.choice.carries)
    if sharded.seconds < _WORTH_TELLING * own_s:
        logger.info(
            "while steps are clipped, an all-reduce overlaps nothing but backwards: with "
            "--use-distributed-optimizer --overlap-param-gather an iteration is predicted to take "
            "%.4g s, without it at least %.4g s",
            sharded.seconds,
            own_s,
        )
