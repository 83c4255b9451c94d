"""``--recompute-layers auto``: each rank recomputes as few layers as its memory allows.

The first three forwards of each stage are measured, to see how many bytes a micro-batch keeps for
its backward. The first forward warms up, the second recomputes all layers, the third all but one.
Ranks then exchange these numbers, and every rank computes the choices of all ranks from them. The
next iteration runs with the choices; the one after it logs the memory that they really took.

Keeps one invariant: all replicas recompute the same layers, since recomputation has collectives.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

import torch.distributed as dist
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron.fold3d.plan.ir import Action, Plan
from megatron.fold3d.plan.ops import COMPUTE_OPS, FORTH
from megatron.fold3d.policy.measured_times import usable_bytes
from megatron.fold3d.policy.recompute_choice import (
    CountsChoice,
    StageBytes,
    fewest_counts,
    fully_recomputed_peak,
)
from megatron.fold3d.runtime.agreement import gathered
from megatron.fold3d.runtime.device import free_device_bytes, held_device_bytes, peak_device_bytes
from megatron.fold3d.runtime.feature import Feature, Handler, Handlers, Iteration, within
from megatron.fold3d.runtime.measure.saved_bytes import SavedBytes, left_bytes
from megatron.fold3d.runtime.recompute_counts import blocks_of, recompute_first

logger = logging.getLogger(__name__)

# A backward saves a few numbers more, such as the scale of the loss: one block of an allocator.
_SCALARS = 512
_ALL, _ALL_BUT_ONE = 1, 2  # forwards of a stage, counted from 0


class MeasuredCounts(Feature):
    """Measures what layers take, and then sets the number that each model chunk recomputes.

    Args:
        limit_bytes: the limit of a rank's saved activations; None is what the GPU has left.
    """

    preparing = "the choice of layers to recompute"

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._blocks: dict[int, list[TransformerBlock]] = {}  # by stage
        self._forwards: Counter[int] = Counter()
        self._left: dict[tuple[int, int], int] = {}  # bytes, by stage and number of its forward
        self._stages: list[Mapping[int, StageBytes]] = []  # by pipeline rank
        self._limits: list[float] = []
        self._beside: list[float] = []  # what the device holds beside saved activations
        self._choices: dict[Plan, Sequence[CountsChoice]] = {}
        self._predicted: Sequence[CountsChoice] = ()  # of the iteration whose peak is measured
        self._meter: SavedBytes | None = None
        self._has_told = False

    def prepare(self, iteration: Iteration) -> None:
        """Choose once all stages are measured, and again for each other number of micro-batches.

        Raises:
            ValueError: a rank's activations take more than the limit with all layers recomputed.
        """
        if not self._blocks:
            self._blocks = blocks_of(iteration)
            for stage in self._blocks:
                self._recompute(stage, self._layers(stage))
        if not self._stages:
            if any(self._forwards[stage] <= _ALL_BUT_ONE for stage in self._blocks):
                return
            self._agree(iteration)
        elif self._predicted and not self._has_told:
            self._tell(iteration)
        for stage, count in self._chosen(iteration.plan)[iteration.rank].recomputed.items():
            self._recompute(stage, count)

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return handlers that measure: forwards at first, then the peak of one iteration."""
        if self._has_told:
            return {}
        if not self._stages:
            run_forward = inner[FORTH.compute]
            return {FORTH.compute: lambda action: self._measure(iteration, run_forward, action)}
        self._predicted = self._choices[iteration.plan]
        if held_device_bytes(iteration.device) is not None:
            return {}
        meter = self._meter = SavedBytes(iteration.chunks)
        return {op: within(lambda _: meter.hooks(), inner[op]) for op in COMPUTE_OPS}

    def _layers(self, stage: int) -> int:
        return sum(len(block.layers) for block in self._blocks[stage])

    def _recompute(self, stage: int, count: int) -> None:
        for block in self._blocks[stage]:
            recompute_first(block, count)

    def _measure(self, iteration: Iteration, run: Handler, action: Action) -> None:
        """Run a forward; note the bytes that it saves, if it is one of those that are measured."""
        stage = action.stage
        number, layers = self._forwards[stage], self._layers(stage)
        self._forwards[stage] += 1
        if number not in (_ALL, _ALL_BUT_ONE):
            run(action)
            return
        if number == _ALL_BUT_ONE:
            self._recompute(stage, max(0, layers - 1))
        self._left[stage, number] = left_bytes(lambda: run(action), iteration)
        self._recompute(stage, layers)

    def _agree(self, iteration: Iteration) -> None:
        """Agree, for each pipeline rank, on its replicas' largest sizes and least free memory."""
        mine = {
            stage: StageBytes(
                layers=self._layers(stage),
                recomputed=self._left[stage, _ALL] + _SCALARS,
                kept=max(0, self._left[stage, _ALL_BUT_ONE] - self._left[stage, _ALL]),
            )
            for stage in self._blocks
        }
        free, peak = free_device_bytes(iteration.device), peak_device_bytes(iteration.device)
        everyones = gathered((iteration.rank, mine, free or 0, peak or 0))
        for rank, program in enumerate(iteration.plan.programs):
            replicas = [found[1:] for found in everyones if found[0] == rank]
            stages, spares, peaks = zip(*replicas, strict=True)
            largest = {
                stage: StageBytes._make(map(max, zip(*(its[stage] for its in stages), strict=True)))
                for stage in stages[0]
            }
            held = fully_recomputed_peak(program, largest)
            usable = held + usable_bytes(min(spares))
            self._stages.append(largest)
            self._limits.append(usable if self._limit_bytes is None else self._limit_bytes)
            self._beside.append(max(0.0, max(peaks) - held))

    def _chosen(self, plan: Plan) -> Sequence[CountsChoice]:
        """Return the choice of each rank for a plan; log it when it is new."""
        if plan not in self._choices:
            choices = []
            of_ranks = zip(plan.programs, self._stages, self._limits, strict=True)
            for rank, of_rank in enumerate(of_ranks):
                try:
                    choices.append(fewest_counts(*of_rank))
                except ValueError as error:
                    raise ValueError(f"--recompute-layers auto: rank {rank}: {error}") from None
            self._choices[plan] = choices
            if dist.get_rank() == 0:
                of_stages = chain.from_iterable(choice.recomputed.items() for choice in choices)
                logger.info(
                    "--recompute-layers %s, chosen for %s micro-batches: activations take at most "
                    "%s bytes by pipeline rank, of %s",
                    ",".join(str(n) for _, n in sorted(of_stages)),
                    plan.num_microbatches,
                    _in_words([choice.peak_bytes for choice in choices]),
                    _in_words(self._limits),
                )
        return self._choices[plan]

    def _tell(self, iteration: Iteration) -> None:
        """Log the peak of the iteration that has just ended beside what was predicted."""
        self._has_told = True
        peak = peak_device_bytes(iteration.device) if self._meter is None else self._meter.peak
        peaks: Counter[int] = Counter()
        for rank, found in gathered((iteration.rank, peak or 0)):
            peaks[rank] = max(peaks[rank], found)
        predicted = [
            choice.peak_bytes + beside
            for choice, beside in zip(self._predicted, self._beside, strict=True)
        ]
        if dist.get_rank() == 0:
            exceeds = any(peaks[rank] > most for rank, most in enumerate(predicted))
            logger.log(
                logging.WARNING if exceeds else logging.INFO,
                "--recompute-layers auto: measured %s bytes by pipeline rank, predicted %s",
                _in_words([peaks[rank] for rank in range(len(predicted))]),
                _in_words(predicted),
            )
        self._meter = None


def _in_words(amounts: Sequence[float]) -> str:
    return ", ".join(f"{amount:.0f}" for amount in amounts)
