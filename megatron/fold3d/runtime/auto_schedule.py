"""``--schedule auto``, and what else a word leaves open: try what is predicted, keep the fastest.

    iteration  1       2         3          4      5        6      7      8        9      10     11
               starts  measured  predicted  timed  changes  timed  timed  changes  timed  timed  ..
                                 and timed
    runs       the first choice ──────────────── second ────────────── third ─────────────── fastest

The first choice is stock's order, or what the flags say but for what they leave to ``auto``. An
iteration is timed from its first action to the end of its optimizer step, so evaluations and
checkpoints are not counted. If an iteration's step is skipped, or the iteration is run again, it
does not count and the next one takes its place. Each number of micro-batches has its own choice.

If DP.sync reaches into the next iteration, a step that may be clipped has to wait for all gradients
and gains nothing. So such a choice runs only while `DueSteps.is_free`, and is tried then; in
between the fastest of the others runs.

Keeps one invariant: all ranks choose in the same iteration, from the same numbers.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.ops import COMPUTE_OPS, WEIGHT_OPS
from megatron.fold3d.plan.passes.weight_grads import split_in_place
from megatron.fold3d.policy.measured_times import MeasuredTimes
from megatron.fold3d.policy.predicted import Predicted
from megatron.fold3d.policy.shard_order import started_shares
from megatron.fold3d.runtime.device import free_device_bytes, synchronize
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, group_of
from megatron.fold3d.runtime.measure.run_times import RunTimes
from megatron.fold3d.runtime.plans import Plans

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.due_steps import DueSteps
    from megatron.fold3d.runtime.grad_sync.other_shards import ReplicatedSegments

logger = logging.getLogger(__name__)

MEASURED, DECIDED = 2, 3  # training iterations
TIMED = 2  # iterations of each choice; the faster one counts
_MOST_REPEATS = 3  # of an iteration before which due steps were taken, as before an evaluation
_WORTH_TELLING = 0.98  # a prediction, of the run's own
_FREE_SHARE = 0.9  # of a device's memory that was never used


class Chooser(Protocol):
    """Makes predictions; `predict.search.descent.Descent`, not importable from here."""

    @property
    def first(self) -> Predicted:
        """The prediction for the first choice."""

    def to_try(self) -> Sequence[Predicted]:
        """Return the choices worth trying, at most two, the faster one first."""


class _Trial:
    """The choices for one number of micro-batches; equal on all ranks except for `times_s`.

    Attributes:
        choices: the first choice, then those to try.
        times_s: by choice, the times of its iterations that count, on this rank.
        measured_s: by choice, the fastest iteration of the slowest rank, once it is known.
        repeats: iterations of the choice that is tried, so far without a second time.
    """

    def __init__(self, choices: Sequence[Predicted]) -> None:
        self.choices = choices
        self.times_s: list[list[float]] = [[] for _ in choices]
        self.measured_s = [inf] * len(choices)
        self.repeats = 0

    def untimed(self, *, free: bool) -> list[int]:
        """Return the choices that have to be timed before one of them is chosen."""
        fitting = self._fitting(free=free)
        return [i for i in fitting if len(self.times_s[i]) < TIMED] if len(fitting) > 1 else []

    def current(self, *, free: bool) -> int:
        """Return the choice that runs now: what is not yet timed, or the fastest.

        Args:
            free: whether DP.sync may reach into the next iteration.
        """
        if untimed := self.untimed(free=free):
            return untimed[0]
        return min(self._fitting(free=free), key=self.measured_s.__getitem__)

    def _fitting(self, *, free: bool) -> list[int]:
        """Return what may run; if all carry steps, what was predicted best, which then does not."""
        fitting = [i for i, one in enumerate(self.choices) if free or not one.choice.carries]
        return fitting or [min(1, len(self.choices) - 1)]


class AutoSchedule(Feature):
    """Measures, and chooses how a run's iterations are computed, summed and stepped.

    Args:
        config: the configuration of the run.
        plans: the plans of the run.
        search: makes the prediction from measured times; see `measured_search`.
        due: takes the steps that reach into the next iteration, if the run may have any.
        replicated: takes the steps of replicated segments, if the run may have any.
    """

    preparing = "the measurement of its links"

    def __init__(
        self,
        config: Fold3DConfig,
        plans: Plans,
        search: Callable[..., Chooser],
        *,
        due: "DueSteps | None" = None,
        replicated: "ReplicatedSegments | None" = None,
    ) -> None:
        self._config, self._plans, self._search = config, plans, search
        self._due, self._replicated = due, replicated
        self._times = RunTimes()
        self._trials: dict[int, _Trial] = {}
        self._iterations = 0
        self._size = 0  # micro-batches of the iterations that `_iterations` counts
        self._index = 0  # of the choice that runs

        # Of the latest training iteration.
        self._latest: Iteration | None = None
        self._began_s: float | None = None
        self._took_s: float | None = None  # None if its step was not taken
        self._follows_itself = False  # it runs the same choice as the one before
        self._is_steady = True

    @property
    def _flag(self) -> str:
        config = self._config
        for name, chooses in (
            ("--schedule auto", config.choice.order == "auto"),
            ("step=next", "share" in config.auto),
            ("optimizer=auto", "optimizer" in config.auto),
            ("ahead=auto", "ahead" in config.auto),
        ):
            if chooses:
                return name
        return "wgrad=gaps"

    @property
    def _is_free(self) -> bool:
        return self._due is None or self._due.is_free

    def choose_plan(self, plan: Plan, rank: int) -> Plan:
        """Take account of the iteration before; return the plan of the choice that runs now."""
        if self._latest is not None:
            self._count(self._latest)
            self._latest = None
        size, before = plan.num_microbatches, (self._size, self._index)
        if size != self._size:
            self._size = size
            self._iterations = DECIDED if size in self._trials else 0
            self._times.clear()
        chosen = self._now(plan)
        self._follows_itself = before == (self._size, self._index)
        if chosen is not self._plans.chosen(size):
            self._plans.choose(size, chosen)
            plan = self._plans.training(size)
        if self._replicated is not None:
            choice = self._config.choice if chosen is None else chosen.choice
            self._replicated.choose(choice.where(optimizer="replicated"))
        return plan

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return handlers that time the computations of the second training iteration."""
        is_measured = iteration.trains and self._iterations == MEASURED
        return self._times.handlers(iteration, inner) if is_measured else {}

    def prepare(self, iteration: Iteration) -> None:
        """Predict in the third training iteration; start the clock if the iteration is timed."""
        if not iteration.trains:
            return
        self._iterations += 1
        if self._iterations == DECIDED:
            self.decide(self._times.agreed(iteration), iteration)
        self._latest, self._began_s, self._took_s = iteration, None, None
        trial = self._trials.get(self._size)
        if trial is not None and trial.untimed(free=self._is_free):
            carries = trial.choices[self._index].choice.carries
            self._is_steady = not carries or self._due is None or self._due.has_due
            synchronize(iteration.device)
            self._began_s = time.perf_counter()

    def note_step(self, *, taken: bool) -> None:
        """Note the end of the iteration's optimizer step, and whether Megatron took it."""
        if taken and self._latest is not None and self._began_s is not None:
            synchronize(self._latest.device)
            self._took_s = time.perf_counter() - self._began_s

    def decide(self, times: MeasuredTimes, iteration: Iteration) -> None:
        """Let the first rank predict which choices are worth trying, and broadcast them."""
        room, sizes = replication_room(iteration)
        replicas = _num_replicas(iteration)
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            shard_shares = started_shares(_num_layers(iteration), replicas)
            search = partial(self._search, times, room=room, sizes=sizes, shard_shares=shard_shares)
            found = [self._predicted(search, iteration.plan.num_microbatches, replicas)]
        dist.broadcast_object_list(found, src=0)
        self._trials[self._size] = _Trial(found[0])

    def _predicted(
        self, search: Callable[..., Chooser], size: int, num_replicas: int
    ) -> list[Predicted]:
        """Return the prediction of the first choice, and of those worth trying."""
        config, order, first = self._config, self._plans.order(size), self._config.choice
        chooses_all = config.choice.order == "auto"
        if chooses_all:
            first = replace(first, order=first.schedule)
        if first.fills_gaps:
            order = order.select(COMPUTE_OPS - WEIGHT_OPS)
        search = partial(
            search,
            first=first,
            order=order,
            frees_order=chooses_all,
            frees_ahead="ahead" in config.auto,
            tied=config.ties_embeddings,
            keeps_forwards=config.keeps_forwards,
            parameter_share=config.parameter_share,
            preemptive=config.preemptive_comm,
        )
        own = search(features=config.features, free=config.free(num_replicas))
        predicted = [own.first, *own.to_try()]
        if chooses_all and not self._is_free:  # so it has an all-reduce: nothing else carries steps
            sharded = replace(config.features, gathers_params=True)
            _advise(predicted, search(features=sharded, free={}).first)
        self._tell_of_trial(predicted)
        cuts = [
            one.choice.carries
            or one.choice.where(optimizer="replicated")
            or (config.features.reduces_early and one.choice.splits)
            for one in predicted
        ]
        if chooses_all and num_replicas > 2 and any(cuts):
            logger.info(
                "--schedule auto tries what adds up the gradients of %s replicas in another "
                "order: results may differ from stock's by rounding. --deterministic-mode "
                "keeps stock's order",
                num_replicas,
            )
        return predicted

    def _now(self, plan: Plan) -> Predicted | None:
        """Return the choice for the iteration that begins; None is the first one."""
        trial, number = self._trials.get(self._size), self._iterations + 1
        if trial is not None:
            self._index = trial.current(free=self._is_free)
            return trial.choices[self._index]
        self._index = 0
        order = self._plans.order(plan.num_microbatches)
        splits = "wgrad" in self._config.auto or self._config.apart
        if number == MEASURED and splits and not order.has(*WEIGHT_OPS):
            first = self._config.choice
            return Predicted(
                choice=first,
                order=split_in_place(order),
                shares=self._plans.shares(order),
                seconds=inf,
            )
        return None

    def _count(self, iteration: Iteration) -> None:
        """Note the time of an iteration that has ended; with a choice's last one, compare."""
        trial, index = self._trials.get(self._size), self._index
        if trial is None or self._took_s is None or not self._follows_itself:
            return
        had_to_wait = trial.choices[index].choice.carries and not self._is_free
        if had_to_wait or len(trial.times_s[index]) == TIMED:
            return
        trial.repeats += 1
        if not (self._is_steady or trial.repeats > _MOST_REPEATS):
            return
        trial.times_s[index].append(self._took_s)
        if len(trial.times_s[index]) < TIMED:
            return
        trial.repeats = 0
        slowest = torch.tensor(
            min(trial.times_s[index]), dtype=torch.float64, device=iteration.device
        )
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        trial.measured_s[index] = slowest.item()
        if dist.get_rank() == 0 and not trial.untimed(free=self._is_free):
            logger.info(
                "from now on, as %s chose: %s; iterations took %s",
                self._flag,
                trial.choices[trial.current(free=self._is_free)].choice,
                ", ".join(
                    f"{one.choice}: {seconds:.4g} s"
                    for one, seconds in zip(trial.choices, trial.measured_s, strict=True)
                    if seconds < inf
                ),
            )

    def _tell_of_trial(self, predicted: Sequence[Predicted]) -> None:
        first, *others = predicted
        shares = next((one.shares for one in predicted if one.choice.carries), ())
        if shares:
            logger.info(
                "shares of DP.sync that start behind a stage's backwards, as %s chose: %s",
                self._flag,
                ", ".join(f"{share:.2f}" for share in shares),
            )
        if not others:
            logger.info(
                "from now on, as %s chose: %s; nothing that fits is predicted to be faster than "
                "its %.4g s",
                self._flag,
                first.choice,
                first.seconds,
            )
            return
        logger.info(
            "%s tries %s; predicted for %s: %.4g s",
            self._flag,
            ", then ".join(
                f"{one.choice}, predicted {one.seconds:.4g} s"
                + (
                    ", once steps are not clipped"
                    if one.choice.carries and not self._is_free
                    else ""
                )
                for one in others
            ),
            first.choice,
            first.seconds,
        )


def _advise(predicted: Sequence[Predicted], sharded: Predicted) -> None:
    """Log that the distributed optimizer would be faster where most steps are clipped.

    Args:
        predicted: the choices of this run.
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


def replication_room(iteration: Iteration) -> tuple[float, Sequence[float]]:
    """Return the free bytes of the fullest rank, and the bytes of each segment's other shards."""
    others = 1 - 1 / iteration.groups.dp_cp.size()
    sizes = [
        sum(p.numel() * (8 if p.dtype == torch.float32 else 12) for p in chunk.parameters())
        for chunk in iteration.chunks
    ]
    free = free_device_bytes(iteration.device)
    mine = [-1.0 if free is None else -_FREE_SHARE * free, *(others * size for size in sizes)]
    found = torch.tensor(mine, dtype=torch.float64, device=iteration.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    minus_free, *largest = found.tolist()
    return (inf if free is None else -minus_free), largest


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
