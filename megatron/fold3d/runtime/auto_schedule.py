"""``--schedule auto``: try the choices with the best predictions, and keep the fastest.

    iteration  1       2         3          4      5        6      7      8        9      10
               starts  measured  predicted  timed  changes  timed  timed  changes  timed  judged
                                 and timed
    runs       stock's order ───────────────────── first to try ──────── second to try ── fastest

An iteration is timed from its first action to the end of its optimizer step, so evaluations and
checkpoints are not counted. If an iteration's step is skipped, or the iteration is run again, it
does not count and the next one takes its place. Each number of micro-batches has its own choice.

If DP.sync reaches into the next iteration, a step that may be clipped has to wait for all gradients
and gains nothing. Early in training this happens in nearly every step, later it may become rare.
So if most steps in stock's order were clipped, such a choice is not tried at first. If it was not
tried, or lost because its steps had to wait, it is tried later. If it won, and more than half of
its steps begin to wait, the run changes to the fastest of the other choices.

Keeps one invariant: all ranks choose in the same iteration, from the same numbers.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.passes.weight_grads import split_in_place
from megatron.fold3d.policy.measured_times import MeasuredTimes
from megatron.fold3d.policy.run_choice import RunChoice
from megatron.fold3d.policy.shard_order import started_shares
from megatron.fold3d.runtime.device import synchronize
from megatron.fold3d.runtime.feature import Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, group_of
from megatron.fold3d.runtime.grad_sync.measured_replication import (
    parameter_share,
    replication_room,
)
from megatron.fold3d.runtime.measured_order import MEASURED, MeasuredTimesFeature
from megatron.fold3d.runtime.plans import Plans

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.deferred_sync import DeferredSync
    from megatron.fold3d.runtime.grad_sync.replicated_steps import ReplicatedSteps

logger = logging.getLogger(__name__)

_TIMED = {3: 0, 4: 0, 6: 1, 7: 1, 9: 2}  # training iterations, and which choice they run
_RUN = {5: 1, 6: 1, 7: 1, 8: 2, 9: 2}  # the same, with those that change; in all others stock's
_LAST = (4, 7, 9)  # iterations of each choice
_OVER = max(_LAST) + 1
_MOST_REPEATS = 3  # of an iteration before which due steps were taken, as before an evaluation
WINDOW = 20  # iterations, of which more than half have to wait before another choice goes on
FIRST_REST = 50  # iterations until a choice that lost to clipping is tried again; then doubled
_AGAIN = 3  # iterations for which it is
_WORTH_TELLING = 0.98  # a prediction, of the run's own


class Expected(Protocol):
    """A choice with its predicted time, as `predict.search.choice_search.Predicted` has them."""

    @property
    def choice(self) -> RunChoice:
        """The choice."""

    @property
    def seconds(self) -> float:
        """The predicted time of an iteration."""


class Chooser(Protocol):
    """Makes predictions; `predict.search.choice_search.ChoiceSearch`, not importable from here."""

    @property
    def stock(self) -> Expected:
        """The prediction for stock's order."""

    def to_try(self) -> Sequence[Expected]:
        """Return the choices worth trying, at most two, the faster one first."""


class _Trial:
    """The choices for one number of micro-batches; equal on all ranks except for `times_s`.

    Attributes:
        choices: stock's order, then the choices to try.
        rests: whether the last choice defers DP.sync and is not tried before `rest` is over.
        times_s: by choice, the times of its iterations that count, on this rank.
        measured_s: by choice, the fastest iteration of the slowest rank, once they are compared.
        waited: by choice, whether its last step waited for all gradients.
        chosen: the index of the choice that won; None until they are compared.
        steps: whether each of the latest steps of the winner waited for all gradients.
        rest: iterations until a choice that lost because steps waited is tried again; 0 is never.
        next_rest: the next value of ``rest``.
        again: iterations left of trying it again.
    """

    def __init__(self, choices: Sequence[RunChoice], *, rests: bool = False) -> None:
        self.choices, self.rests = choices, rests
        self.times_s: list[list[float]] = [[] for _ in choices]
        self.measured_s = [inf] * len(choices)
        self.waited = [False] * len(choices)
        self.chosen: int | None = None if len(choices) > 1 else 0
        self.steps: list[bool] = []
        self.rest = 0
        self.next_rest = FIRST_REST
        self.again = 0

    @property
    def last(self) -> int:
        """The training iteration that ends the trial."""
        return _LAST[len(self.choices) - 1 - self.rests]

    @property
    def deferring(self) -> int | None:
        """The index of the choice whose DP.sync may reach into the next iteration, if any."""
        return next((i for i, choice in enumerate(self.choices) if choice.defers), None)

    def fastest(self, *, defers: bool = True) -> int:
        """Return the index of the fastest choice; if several are equally fast, the first.

        Args:
            defers: whether DP.sync of the choice may reach into the next iteration.
        """
        fitting = [i for i, choice in enumerate(self.choices) if defers or not choice.defers]
        return min(fitting, key=self.measured_s.__getitem__)

    def go_on_without_deferring(self) -> None:
        """Change to the fastest choice that does not defer DP.sync; try the other again later."""
        self.chosen, self.again = self.fastest(defers=False), 0
        self.steps.clear()
        self.rest, self.next_rest = self.next_rest, 2 * self.next_rest


class AutoSchedule(MeasuredTimesFeature):
    """Chooses the order and the options of a run's iterations.

    Args:
        config: the configuration of the run.
        plans: the plans of the run.
        search: makes the prediction from measured times; see `ChoiceSearch.measured`.
        deferred: takes the steps that reach into the next iteration, if the run may have any.
        replicated: takes the steps of replicated segments, if the run may have any.
    """

    def __init__(
        self,
        config: Fold3DConfig,
        plans: Plans,
        search: Callable[..., Chooser],
        *,
        deferred: "DeferredSync | None" = None,
        replicated: "ReplicatedSteps | None" = None,
    ) -> None:
        super().__init__()
        self._config, self._plans, self._search = config, plans, search
        self._deferred, self._replicated = deferred, replicated
        self._trials: dict[int, _Trial] = {}
        self._size = 0  # micro-batches of the iterations that `_iterations` counts
        self._applied: RunChoice | None = None

        # Of the latest training iteration.
        self._latest: Iteration | None = None
        self._began_s: float | None = None
        self._took_s: float | None = None  # None if its step was not taken
        self._is_steady = True
        self._repeats = 0

    def choose_plan(self, plan: Plan, rank: int) -> Plan:
        """Take account of the iteration before; return the plan of the choice that runs now."""
        if self._latest is not None:
            self._count(self._latest)
            self._latest = None
        size = plan.num_microbatches
        if size != self._size:
            self._begin(size)
        choice = self._now(plan)
        if choice is not self._plans.choice(size):
            self._plans.choose(size, choice)
            plan = self._plans.training(size)
        self._apply(choice, rank, plan.num_ranks)
        return plan

    def prepare(self, iteration: Iteration) -> None:
        """Predict in the third training iteration; start the clock if the iteration is timed."""
        super().prepare(iteration)
        if not iteration.trains:
            return
        self._latest, self._began_s, self._took_s = iteration, None, None
        deferred = self._deferred
        self._is_steady = deferred is None or deferred.waited or deferred.has_due
        trial = self._trials.get(self._size)
        if trial is not None and (trial.again or trial.chosen is None):
            synchronize(iteration.device)
            self._began_s = time.perf_counter()

    def note_step(self, *, taken: bool) -> None:
        """Note the end of the iteration's optimizer step, and whether Megatron took it."""
        if not taken or self._latest is None:
            return
        self._took_s = 0.0
        if self._began_s is not None:
            synchronize(self._latest.device)
            self._took_s = time.perf_counter() - self._began_s

    def decide(self, times: MeasuredTimes, iteration: Iteration) -> None:
        """Let the first rank predict which choices are worth trying, and broadcast them."""
        config, plan = self._config, iteration.plan
        room, sizes = replication_room(iteration)
        replicas = _num_replicas(iteration)
        cuts = config.may_cut_sums(replicas)
        found: list[Any] = [None, False]
        clipped = 0.0 if self._deferred is None else self._deferred.clipped
        rests = clipped > 1 / 2
        if dist.get_rank() == 0:
            search = partial(
                self._search,
                times,
                num_ranks=plan.num_ranks,
                num_segments=plan.num_segments,
                num_microbatches=plan.num_microbatches,
                group_size=config.microbatch_group_size,
                tied=config.ties_embeddings,
                keeps_forwards=config.keeps_forwards,
                parameter_share=parameter_share(iteration),
                room=room,
                sizes=sizes,
                clipped=0.0 if rests else clipped,
                shard_shares=started_shares(_num_layers(iteration), replicas),
            )
            own = search(
                defers=config.auto_defers and cuts,
                delays=config.auto_delays,
                replicates=config.auto_replicates and cuts,
                gathers=config.gathers_params,
                reduces_early=config.reduces_early,
            )
            predicted = [own.stock, *own.to_try()]
            if rests:  # so the run has an all-reduce: nothing else defers
                alike = search(defers=False, delays=False, replicates=False, gathers=True)
                _advise(predicted, alike.stock)
                predicted.sort(key=lambda one: one.choice.defers)
            rests = predicted[-1].choice.defers and rests
            _tell_of_trial(predicted, rests=rests)
            cut = [
                one.choice.cuts_sums or (config.reduces_early and one.choice.delayed)
                for one in predicted
            ]
            if replicas > 2 and any(cut):
                logger.info(
                    "--schedule auto tries what adds up the gradients of %s replicas in another "
                    "order: results may differ from stock's by rounding. --deterministic-mode "
                    "keeps stock's order",
                    replicas,
                )
            found = [[one.choice for one in predicted], rests]
        dist.broadcast_object_list(found, src=0)
        self._trials[self._size] = _Trial(found[0], rests=found[1])

    def _begin(self, size: int) -> None:
        """Begin to count iterations with another number of micro-batches."""
        trial = self._trials.get(self._size)
        if trial is not None and trial.chosen is None:
            del self._trials[self._size]  # it would have to begin anew
        self._size, self._repeats = size, 0
        self._iterations = _OVER if size in self._trials else 0
        self._marks.clear()
        self._bytes.clear()

    def _now(self, plan: Plan) -> RunChoice | None:
        """Return the choice for the iteration that begins; None is stock's order."""
        trial, number = self._trials.get(self._size), self._iterations + 1
        if trial is None:
            if number == MEASURED and self._config.auto_delays:
                order = split_in_place(self._plans.order(plan.num_microbatches))
                return RunChoice(name="stock's order, measured", order=order)
            return None
        if trial.again:
            return trial.choices[_some(trial.deferring)]
        return trial.choices[_RUN.get(number, 0) if trial.chosen is None else trial.chosen]

    def _apply(self, choice: RunChoice | None, rank: int, num_ranks: int) -> None:
        """Pass the choice on to the features that take optimizer steps."""
        if choice is self._applied:
            return
        self._applied = choice
        if self._replicated is not None:
            self._replicated.choose(() if choice is None else choice.replicated)
        if self._deferred is not None and choice is not None and choice.shares is not None:
            self._deferred.set_shares(choice.shares[rank::num_ranks])

    def _count(self, iteration: Iteration) -> None:
        """Take account of an iteration that has ended."""
        trial = self._trials.get(self._size)
        if trial is None:
            return
        if trial.again:
            self._count_again(trial, iteration)
        elif trial.chosen is None:
            self._count_trial(trial, iteration)
        elif trial.choices[trial.chosen].defers:
            trial.steps = [*trial.steps, self._waited()][-WINDOW:]
            if len(trial.steps) == WINDOW and sum(trial.steps) > WINDOW // 2:
                trial.go_on_without_deferring()
                self._tell(trial, f"most of {WINDOW} steps waited for all gradients")
        elif trial.rest:
            trial.rest -= 1
            if not trial.rest:
                trial.again = _AGAIN
                trial.times_s[_some(trial.deferring)].clear()

    def _count_trial(self, trial: _Trial, iteration: Iteration) -> None:
        """Note the time of an iteration; if it was the last to be timed, compare the choices."""
        number = self._iterations
        if (index := _TIMED.get(number)) is not None:
            self._note_time(trial, index, accept=self._repeats >= _MOST_REPEATS)
            if number in _LAST and not trial.times_s[index]:
                self._iterations -= 1
                self._repeats += self._took_s is not None
                return
        if number in _LAST:
            self._repeats = 0
        if number == trial.last:
            self._compare(trial, iteration)
            trial.chosen = trial.fastest()
            why = ", ".join(
                f"{choice}: {seconds:.4g} s"
                for choice, seconds in zip(trial.choices, trial.measured_s, strict=True)
                if seconds < inf
            )
            lost = trial.deferring
            if lost not in (None, trial.chosen) and (trial.rests or trial.waited[_some(lost)]):
                trial.go_on_without_deferring()
            self._tell(trial, f"iterations took {why}")

    def _count_again(self, trial: _Trial, iteration: Iteration) -> None:
        """Note the time of an iteration of the choice that is tried again."""
        index = _some(trial.deferring)
        if self._took_s is None or self._waited():
            trial.go_on_without_deferring()
            return
        if trial.again < _AGAIN:
            self._note_time(trial, index, accept=True)
        trial.again -= 1
        if not trial.again:
            self._compare(trial, iteration)
            trial.chosen = trial.fastest()
            self._tell(trial, f"steps do not wait; iterations took {trial.measured_s[index]:.4g} s")

    def _note_time(self, trial: _Trial, index: int, *, accept: bool) -> None:
        """Note the time of the latest iteration, if its step was taken and it was steady."""
        defers = trial.choices[index].defers
        if self._took_s is not None and (accept or self._is_steady or not defers):
            trial.times_s[index].append(self._took_s)
            trial.waited[index] |= defers and self._waited()

    def _compare(self, trial: _Trial, iteration: Iteration) -> None:
        """Compare the choices by their times on the slowest rank."""
        mine = [
            min(times, default=known)
            for times, known in zip(trial.times_s, trial.measured_s, strict=True)
        ]
        found = torch.tensor(mine, dtype=torch.float64, device=iteration.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        trial.measured_s = found.tolist()

    def _waited(self) -> bool:
        return self._deferred is not None and self._deferred.waited

    def _tell(self, trial: _Trial, why: str) -> None:
        if dist.get_rank() == 0:
            chosen = trial.choices[_some(trial.chosen)]
            logger.info("schedule from now on, as --schedule auto chose: %s; %s", chosen, why)


def _advise(predicted: Sequence[Expected], sharded: Expected) -> None:
    """Log that the distributed optimizer would be faster where most steps are clipped.

    Args:
        predicted: the choices of this run.
        sharded: stock's order with the distributed optimizer.
    """
    own_s = min(one.seconds for one in predicted if not one.choice.defers)
    if sharded.seconds < _WORTH_TELLING * own_s:
        logger.info(
            "most steps are clipped, so an all-reduce overlaps nothing but backwards: with "
            "--use-distributed-optimizer --overlap-param-gather an iteration is predicted to take "
            "%.4g s, without it at least %.4g s",
            sharded.seconds,
            own_s,
        )


def _tell_of_trial(predicted: Sequence[Expected], *, rests: bool) -> None:
    if rests:
        *predicted, resting = predicted
        logger.info(
            "--schedule auto does not try before %s more iterations: %s, predicted %.4g s without "
            "clipping; most steps so far were clipped",
            FIRST_REST,
            resting.choice,
            resting.seconds,
        )
    stock, *others = predicted
    if not others:
        logger.info(
            "schedule from now on, as --schedule auto chose: %s, stock's order; nothing that fits "
            "is predicted to be faster than its %.4g s",
            stock.choice,
            stock.seconds,
        )
        return
    logger.info(
        "--schedule auto tries until iteration %s: %s; predicted for %s, stock's order: %.4g s",
        _LAST[len(others)],
        ", then ".join(f"{one.choice}, predicted {one.seconds:.4g} s" for one in others),
        stock.choice,
        stock.seconds,
    )


def _num_replicas(iteration: Iteration) -> int:
    """Return the largest number of replicas that reduce gradients together, on any rank."""
    sizes = [group_of(group).size() for group in bucket_groups(*iteration.chunks)]
    found = torch.tensor([max(sizes, default=1)], device=iteration.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found.item())


def _num_layers(iteration: Iteration) -> int:
    """Return the transformer layers of this rank's last model chunk."""
    modules = iteration.chunks[-1].modules()
    return sum(isinstance(module, TransformerLayer) for module in modules)


def _some(index: int | None) -> int:
    assert index is not None
    return index
