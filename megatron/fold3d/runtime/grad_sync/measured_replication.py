"""``--replicate-optimizer auto``: chooses segments by measured times, and keeps what is faster.

    iteration  1       2         3          4          5    6     7
               starts  measured  predicted  exchanges  timed      the faster of both is kept
    replicated -       -         -          the segments that are predicted best

Keeps one invariant: all ranks choose in the same iteration, from the same numbers.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.fold3d.plan.ir import Plan, stages_of
from megatron.fold3d.policy.measured_times import MeasuredTimes
from megatron.fold3d.policy.replicated_segments import Segments, choose_replicated, units
from megatron.fold3d.runtime.device import free_device_bytes, synchronize
from megatron.fold3d.runtime.feature import Iteration
from megatron.fold3d.runtime.grad_sync.replicated_steps import ReplicatedSteps
from megatron.fold3d.runtime.measured_order import DECIDED, MeasuredTimesFeature
from megatron.fold3d.runtime.plans import Plans

logger = logging.getLogger(__name__)

_WITHOUT, _WITH = (2, 3), (5, 6)  # the training iterations that are compared
_JUDGED = 7
_FREE_SHARE = 0.9  # of a device's memory that was never used


class Prediction(Protocol):
    """Predicts iteration times, as `predict.search.replicated_choice.SimulatedIteration` does."""

    def seconds(self, replicated: Segments) -> float:
        """Return the seconds of an iteration in which these segments are replicated."""


Predict = Callable[[Plan, Segments, MeasuredTimes, float], Prediction]


class MeasuredReplication(MeasuredTimesFeature):
    """Chooses the segments that `ReplicatedSteps` steps in full.

    Args:
        plans: the plans of the run.
        replicated: takes those steps.
        predict: makes a `Prediction`. It is passed in, since this room may not import `predict`.
        delayed: segments whose weight gradients follow all backwards.
        tied: whether the first and the last segment share their embeddings.
    """

    def __init__(
        self,
        plans: Plans,
        replicated: ReplicatedSteps,
        predict: Predict,
        *,
        delayed: Segments,
        tied: bool,
    ) -> None:
        super().__init__()
        self._plans, self._replicated, self._predict = plans, replicated, predict
        self._delayed, self._tied = delayed, tied
        self._candidate: Segments = ()
        self._began: tuple[int, int, float] | None = None
        self._times_s: dict[int, tuple[int, float]] = {}

    def prepare(self, iteration: Iteration) -> None:
        """Choose segments before the third training iteration; keep or drop them before the 7th."""
        if not iteration.trains:
            self._began = None  # what follows includes the evaluation
            return
        if self._iterations < _JUDGED:
            self._clock(iteration)
        super().prepare(iteration)
        if self._iterations == _JUDGED and self._candidate:
            self._judge(iteration)
        if self._iterations < _JUDGED:
            self._start_clock(iteration)

    def drain(self, iteration: Iteration) -> None:
        """Apply this iteration's choice, from the next iteration on."""
        if iteration.trains and self._iterations in (DECIDED, _JUDGED):
            self._replicated.choose(self._candidate)
            ranks = iteration.plan.num_ranks
            self._plans.replicate(stages_of(self._candidate, ranks))

    def decide(self, times: MeasuredTimes, iteration: Iteration) -> None:
        """Choose the segments with the shortest predicted iteration for which there is memory."""
        order = self._plans.order(iteration.plan.num_microbatches)
        prediction = self._predict(order, self._delayed, times, parameter_share(iteration))
        room, sizes = replication_room(iteration)
        self._candidate, predicted_s = choose_replicated(
            units(len(iteration.chunks), tied=self._tied),
            prediction.seconds,
            lambda some: sum(sizes[segment] for segment in some) <= room,
        )
        without_s = prediction.seconds(())
        if dist.get_rank() == 0:
            chosen = _spelled(self._candidate)
            logger.info(
                "segments that every replica steps in full: %s; predicted iterations: %.4g s, "
                "and %.4g s with none",
                f"{chosen}, tried until iteration {_JUDGED} of this run" if chosen else "none",
                predicted_s,
                without_s,
            )

    def _clock(self, iteration: Iteration) -> None:
        if self._began is not None and self._iterations in (*_WITHOUT, *_WITH):
            synchronize(iteration.device)
            number, size, began_s = self._began
            self._times_s[number] = size, time.perf_counter() - began_s
        self._began = None

    def _start_clock(self, iteration: Iteration) -> None:
        if self._iterations in (*_WITHOUT, *_WITH):
            synchronize(iteration.device)
            size = iteration.plan.num_microbatches
            self._began = self._iterations, size, time.perf_counter()

    def _judge(self, iteration: Iteration) -> None:
        """Keep the candidate unless iterations with as many micro-batches were faster without."""
        sizes = {size for size, _ in self._times_s.values()}
        without, with_them = (
            [self._times_s[i][1] for i in some if i in self._times_s] for some in (_WITHOUT, _WITH)
        )
        known = len(sizes) == 1 and without and with_them
        found = torch.tensor(
            [min(without), min(with_them), 0.0] if known else [0.0, 0.0, 1.0],
            dtype=torch.float64,
            device=iteration.device,
        )
        dist.all_reduce(found, dist.ReduceOp.MAX)
        without_s, with_s, is_unknown = found.tolist()
        candidate = _spelled(self._candidate)
        if is_unknown:
            outcome = f"{candidate}, as predicted: no iterations alike were timed"
        else:
            if without_s < with_s:
                self._candidate = ()
            outcome = (
                f"{_spelled(self._candidate) or 'none'}; iterations took {with_s:.4g} s with "
                f"{candidate} and {without_s:.4g} s with none"
            )
        if dist.get_rank() == 0:
            logger.info("segments that every replica steps in full from now on: %s", outcome)


def parameter_share(iteration: Iteration) -> float:
    """Return the ratio of the bytes of parameters to the bytes of their gradients."""
    parameters: list[Any] = [
        p for chunk in iteration.chunks for p in chunk.parameters() if p.requires_grad
    ]
    num_bytes: int = sum(p.nbytes for p in parameters)
    gradient_bytes: int = sum(p.main_grad.nbytes for p in parameters)
    return num_bytes / gradient_bytes


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
    return (float("inf") if free is None else -minus_free), largest


def _spelled(segments: Segments) -> str:
    return ",".join(map(str, segments))
