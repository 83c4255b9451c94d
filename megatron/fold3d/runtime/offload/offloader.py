"""Keeps saved activations in host memory while no computation needs them (paper Sec. IV).

The plan says when: OFFLOAD starts to copy a micro-batch's activations to the host, during the next
computation; RELOAD starts to copy them back, some computations before their backward. An iteration
is measured, and then decides how many activations are offloaded, and how many computations a copy
may overlap. `HostSlots` provides the host memory.

    compute        0F0 ──┐   0F1    ┌── 0F2   ...   0B1 ──┐   0B2    ┌── 0B0
                         │          │                     │          │
    to the host          └── copy ──┘                     │          │
                         OFFLOAD0   its memory is free    │          │
    to the device                                         └── copy ──┘
                                                          RELOAD0    its slot is free

With depth 1, as here, a copy overlaps one computation. The copy starts when the previous
computation ends, and the next computation waits for it. Neither the host nor another rank waits.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.ir import Action, Op, Program
from megatron.fold3d.plan.ops import COMPUTE_OPS, COPY_OPS, TO_HOST_OPS
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.policy.offload_choice import OffloadTimes, choose_offload
from megatron.fold3d.runtime.device import free_device_bytes
from megatron.fold3d.runtime.events import UNHEARD, Events
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration, Key, within
from megatron.fold3d.runtime.measure.run_recorder import RunRecorder
from megatron.fold3d.runtime.measure.saved_bytes import lasting_storages
from megatron.fold3d.runtime.offload.copies import Copies
from megatron.fold3d.runtime.offload.host_slots import HostSlots
from megatron.fold3d.runtime.offload.saved_tensors import SavedTensors
from megatron.fold3d.runtime.plans import Plans

logger = logging.getLogger(__name__)

_SMALL = 16  # a hidden state divided by this is too small to offload
_OFFLOADED = "offloaded_bytes"


class Offloader(Feature):
    """Moves the tensors that forwards save between the device and a pool of host memory.

    Args:
        config: with ``--offload-activations auto`` no more leaves than the device's memory
            requires, as measured in the first two iterations.
        plans: the plans of the run, whose offloads may change from iteration to iteration.
        num_local: the number of ranks on this node, which share its memory.

    Attributes:
        held: activations on the device now, offloaded or not, counted as in `peak_activations`.
        peak: the largest `held` of this iteration.
        depth: computations that an offload may overlap, from the next iteration on.
    """

    def __init__(
        self,
        config: Fold3DConfig,
        plans: Plans | None = None,
        recorder: Events = UNHEARD,
        num_local: int = 1,
        copies: Copies | None = None,
    ) -> None:
        self._device = torch.device(config.device)
        self._slots = HostSlots(config, num_local)
        self.pool = self._slots.pool
        self.copies = copies or Copies(self._device)
        self.held = self.peak = self.num_reloads = 0
        self.depth = 1
        self._everything = config.offload_everything
        self._sparing = config.offload_activations == "auto"
        self._plans, self._recorder = plans, recorder
        self._num_iterations = 0
        self._timer: RunRecorder | None = RunRecorder(self._device)  # until one is measured
        self._measured: OffloadTimes | None = None
        # By the number of computations of an iteration, and whether sizes and times are known.
        self._chosen: dict[tuple[int, bool, bool], OffloadChoice] = {}
        self._travels: frozenset[Key] = frozenset()
        self._lasting: frozenset[int] = frozenset()
        self._smallest_bytes = 0
        self._now = threading.local()  # what a forward collects; of a pair each has a thread
        self._away: dict[Key, SavedTensors] = {}  # from their forward to their backward
        self._leaving: deque[list[SavedTensors]] = deque()  # by computations left

    def choice(self, program: Program) -> OffloadChoice:
        """Return which of a program's activations to offload, and when; sets `depth`."""
        if self._timer is not None and self._num_iterations > 1:
            timed = Op.FORWARD, Op.BACKWARD, Op.OFFLOAD, Op.RELOAD
            if (means_s := self._timer.means_s(*timed)) is not None:
                sizes = self._slots.activation_bytes, self.peak, free_device_bytes(self._device)
                self._measured, self._timer = OffloadTimes(*sizes, *means_s), None
        computations = tuple(action for action in program if action.op in COMPUTE_OPS)
        key = len(computations), bool(self._slots.activation_bytes), self._measured is not None
        if key not in self._chosen:
            choice = OffloadChoice()
            if self._measured is not None:
                choice = choose_offload(computations, self._measured, sparing=self._sparing)
                many = "all" if choice.at_most is None else f"at most {choice.at_most}"
                logger.info(
                    "of %d activations %s leave, each within %d computations, for %s",
                    *(len(computations) // 2, many, choice.depth, self._measured),
                )
            self._chosen[key] = self._slots.fit_choice(computations, choice)
        self.depth = self._chosen[key].depth
        return self._chosen[key]

    def decide(self, job: Job, rank: int) -> Job:
        """Return the job with this rank's choice of offloads, unless the user's plan has some."""
        if self._plans is None or (job.order is not None and job.order.has(*COPY_OPS)):
            return job
        return replace(job, offload=self.choice(self._plans.training(job).programs[rank]))

    def prepare(self, iteration: Iteration) -> None:
        """Allocate the host memory that the program needs.

        Parameters, buffers, and tensors much smaller than a hidden state stay on the device.

        Raises:
            HostMemoryError: the host has less memory than the program takes.
        """
        program = iteration.program
        self.held = self.peak = 0
        self._recorder.count(_OFFLOADED, 0)  # known where nothing leaves, too
        self._num_iterations += 1
        if self._timer is not None:
            self._timer.clear()  # of the iteration before
        self._away.clear()
        self._leaving = deque([] for _ in range(self.depth))
        self._travels = frozenset((a.stage, a.microbatch) for a in program if a.op in TO_HOST_OPS)
        self._smallest_bytes = iteration.hidden_bytes // _SMALL
        lasting = lasting_storages(iteration.chunks)
        self._lasting = frozenset(storage.data_ptr() for storage in lasting)
        self._slots.reserve_program(program)

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return handlers that copy activations, and wrappers that collect and restore them."""

        def offload(action: Action) -> None:
            input_tensor, _ = iteration.saved[action.stage, action.microbatch]
            self.offload(action, held=input_tensor)

        return {
            Op.FORWARD: within(self.saving, inner[Op.FORWARD]),
            Op.BACKWARD: within(self.using, inner[Op.BACKWARD]),
            Op.OFFLOAD: offload,
            Op.RELOAD: self.reload,
        }

    @contextmanager
    def saving(self, forward: Action) -> Iterator[None]:
        """Collect the tensors that the forward inside saves, if the plan offloads them.

        The stage's first micro-batch is always collected: it shows the size of the slots, which a
        later iteration with more micro-batches may need.
        """
        self._hold()
        key = forward.stage, forward.microbatch
        with self._watched(forward):
            if key not in self._travels and forward.stage in self._slots.bytes_of_stage:
                yield
            else:
                saved = SavedTensors(self._device, self._smallest_bytes, self._lasting)
                self._now.collecting = saved
                with saved.hooks() if self._everything else nullcontext():
                    yield
                self._now.collecting = None
                if key in self._travels:
                    self._away[key] = saved
                else:
                    self._slots.learn_stage(forward.stage, saved.flat()[1])
        self._release()

    def checkpoint(self, upstream: Callable[..., Any], *args: Any) -> Any:
        """Run what is recomputed as Megatron's ``checkpoint`` does; collect the inputs it saves."""
        collecting = getattr(self._now, "collecting", None)
        if collecting is None or self._everything:
            return upstream(*args)
        with collecting.hooks():
            return upstream(*args)

    def offload(self, action: Action, held: torch.Tensor | None) -> None:
        """Start to copy a micro-batch's activations to the host.

        Their device memory is freed after `depth` more computations. They stay on the device if
        the pool has no room.

        Args:
            held: the stage's input, ``[seq, batch, hidden]``. The schedule owns it and needs only
                its gradient from now on; its storage is emptied too. None in the first stage.
        """
        away = self._away[action.stage, action.microbatch]
        sources, num_bytes = away.flat()
        self._slots.learn_stage(action.stage, num_bytes)
        slot = self.pool.take(num_bytes)
        if slot is None:
            del self._away[action.stage, action.microbatch]
            return
        away.held, away.slot = held, slot
        self._recorder.count(_OFFLOADED, num_bytes)
        watch = partial(self._watched, action, "offload")
        away.copied = self.copies.to_host(away.places(slot), sources, watch)
        self._leaving[-1].append(away)

    def reload(self, action: Action) -> None:
        """Start to copy a micro-batch's activations back, if they have left."""
        away = self._away.get((action.stage, action.microbatch))
        if away is None:
            return
        assert away.slot is not None  # the verifier has seen its OFFLOAD
        self._hold()
        away.buffer = torch.empty(away.num_bytes, dtype=torch.uint8, device=self._device)
        away.copied = self.copies.to_device(
            [away.buffer],
            [away.slot[: away.num_bytes]],
            partial(self._watched, action, "offload"),
            after=away.copied,
        )

    @contextmanager
    def using(self, backward: Action) -> Iterator[None]:
        """Make the current stream wait for the reload that the backward inside needs.

        The backward's saved tensors are then valid on that stream, as views of one buffer.
        """
        away = self._away.pop((backward.stage, backward.microbatch), None)
        if away is not None:
            assert away.buffer is not None  # the verifier has seen its RELOAD
            self.num_reloads += 1
            for leaving in self._leaving:
                if away in leaving:  # the computation before, of the same pair, has not ended
                    leaving.remove(away)
                    self._leave(away)
            self.copies.wait(away.copied)
            away.restore(away.buffer)
            if away.slot is not None:
                self.pool.give_back(away.slot)
            del away
        with self._watched(backward):
            yield
        self.held -= 1
        self._release()

    def _release(self) -> None:
        """Free the activations whose offload began `depth` computations ago."""
        for away in self._leaving.popleft():
            self._leave(away)
        self._leaving.append([])

    def _leave(self, away: SavedTensors) -> None:
        self.copies.wait(away.copied)
        away.leave()
        self.held -= 1

    @contextmanager
    def _watched(self, action: Action, kind: str | None = None) -> Iterator[None]:
        """Time the block, an action, for the choice of offloads, and record it if it has a kind."""
        ends = []
        if self._timer is not None and self._travels:
            ends.append(self._timer.open_span(action))
        if kind is not None:
            ends.append(self._recorder.open_span(action, kind))
        yield
        for end in ends:
            end()

    def _hold(self) -> None:
        self.held += 1
        self.peak = max(self.peak, self.held)
