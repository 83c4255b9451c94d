"""``--trace DIR``: records this rank's part of chosen iterations and writes it to a file.

The file is written when the last of these iterations is complete. It is written atomically, so a
run that dies leaves no partial trace. If it cannot be written, the trace is given up with one
warning and training goes on.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.observe.trace_files import IterationTrace, RankTrace
from megatron.fold3d.plan.ir import Action, Plan, Program
from megatron.fold3d.plan.ops import COMPUTE_OPS, GATHER_OPS, SYNC_OPS, TABLE
from megatron.fold3d.plan.waits import Waits
from megatron.fold3d.runtime.device import runs_behind
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration, within
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups
from megatron.fold3d.runtime.trace.metrics import Metrics
from megatron.fold3d.runtime.trace.recorder import WARM_UP, Recorder

logger = logging.getLogger(__name__)

_SUMS = SYNC_OPS - GATHER_OPS
_WAIT_FOR_SUMS = frozenset(op for op in TABLE if any(n.op in _SUMS for n in TABLE[op].needs))


class Tracer(Feature):
    """Records the iterations that the user asked for, or two after warm-up.

    As a feature it records computations, without their transfers, and waits for sums. DP.sync,
    copies and transfers are recorded where they begin and end, and so are the waits for parameters
    inside computations, and optimizer steps inside waits.

    Args:
        config: the configuration of the run; it names the folder and the iterations.
        metrics: receives every iteration, on the rank that has writers.

    Attributes:
        stages: those of this rank's bucket groups, from the first iteration on.
        plan: of the latest iteration that the user asked for; stock has none.
    """

    def __init__(self, config: Fold3DConfig, metrics: Metrics) -> None:
        assert config.trace is not None
        self.recorder = Recorder(torch.device(config.device), self._wants, self._keep)
        self._folder: Path = config.trace
        self._iterations = config.trace_iterations
        self._config = config
        self._metrics = metrics
        self._recorded: list[IterationTrace] = []
        self._is_over = False  # written, or given up
        self._is_asked_for = False  # the latest iteration
        self._num_microbatches = 0  # of the latest that is
        self.stages: dict[Any, int] = {}
        self.plan: Plan | None = None

    @contextmanager
    def iteration(self, number: int, chunks: Sequence[Any]) -> Iterator[None]:
        """Record an iteration over this rank's model chunks, if it is wanted."""
        self.stages = self.stages or {
            bucket_group: self.stage(segment)
            for segment, chunk in enumerate(chunks)
            for bucket_group in bucket_groups(chunk)
        }
        with self.recorder.iteration(number):
            self._is_asked_for = number in (self._iterations or ())
            if self._is_asked_for:  # the next one may have others before this one is written
                self._num_microbatches = get_num_microbatches()
            yield

    def stage(self, segment: int) -> int:
        """Return this rank's stage in a segment."""
        rank: int = parallel_state.get_pipeline_model_parallel_rank()
        return segment * self._config.num_ranks + rank

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return wrappers that record a span around each action that computes or waits for sums."""
        recorder = self.recorder
        if not recorder.is_on:  # as in an evaluation
            return {}
        if self._is_asked_for:
            self.plan = iteration.plan
        awaited = dict(_awaited(iteration.program))

        @contextmanager
        def recorded(action: Action) -> Iterator[None]:
            recorder.running = action
            with ExitStack() as span:
                if action.op in COMPUTE_OPS:
                    span.enter_context(recorder.span(action, "compute"))
                elif action in awaited:
                    span.enter_context(recorder.span(f"wait {awaited[action]}", "wait"))
                yield
            recorder.running = None

        recorded_ops = COMPUTE_OPS | GATHER_OPS | _WAIT_FOR_SUMS
        return {op: within(recorded, inner[op]) for op in recorded_ops}

    def __exit__(self, raised: object, _: object, __: object) -> None:
        """Write what is recorded; warn of a run that had nothing to record and ended by itself."""
        self.recorder.close()
        if self._recorded and not self._is_over:
            self._write()
        if not self._recorded and raised is None:
            logger.warning(
                "--trace %s: nothing is recorded; the run had none of the iterations %s",
                self._folder,
                f"{self._iterations[0]}-{self._iterations[-1]}" if self._iterations else "4-5",
            )

    def _wants(self, number: int) -> bool:
        if self._iterations is None:  # a resumed run does not begin with the first
            self._iterations = range(number + WARM_UP, number + WARM_UP + 2)
        return number in self._iterations or self._metrics.is_wanted

    def _keep(self, iteration: IterationTrace) -> None:
        if self._metrics.is_wanted:
            self._metrics.write(iteration)
        assert self._iterations is not None
        if iteration.iteration in self._iterations and not self._is_over:
            self._recorded.append(iteration)
            if iteration.iteration == self._iterations[-1]:
                self._write()

    def _write(self) -> None:
        self._is_over = True
        rank = dist.get_rank()
        plan = self.plan if rank == 0 else None  # stock has none
        trace = RankTrace(
            rank=rank,
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            cp_rank=parallel_state.get_context_parallel_rank(),
            num_ranks=self._config.num_ranks,
            num_segments=self._config.num_segments,
            num_microbatches=self._num_microbatches,
            schedule=self._config.choice.order,
            plan="" if plan is None else plan.to_text(),
            iterations=tuple(self._recorded),
            microbatch_flops=self._config.microbatch_flops,
            recomputed_flops=self._config.recomputed_flops,
            clock="polls" if runs_behind(torch.device(self._config.device)) else "host",
            shares_cores=self._config.device == "cpu"
            and os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size()),
        )
        path = self._folder / trace.file_name
        unfinished = path.with_suffix(".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(trace.to_json(), encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            logger.warning(
                "--trace %s: %s cannot be written (%s); training goes on without it; "
                "for a trace of this rank make room, or give another folder, and run again",
                self._folder,
                path,
                error.strerror or error,
            )
            return
        if rank == 0:
            numbers = ", ".join(str(row.iteration) for row in self._recorded)
            logger.info("trace of iterations %s is in %s", numbers, self._folder)


def _awaited(program: Program) -> Iterator[tuple[Action, Action]]:
    """Yield the actions that wait for sums, each with the last sum that it waits for."""
    waits = Waits(program)
    for index, action in enumerate(program):
        if action.op in _WAIT_FOR_SUMS and (sums := [s for s, _ in waits.at(index, action)]):
            yield action, max(sums, key=lambda action: action.end)
