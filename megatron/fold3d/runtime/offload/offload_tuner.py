"""Chooses which of a rank's activations are offloaded, and how early, from a measured iteration."""

import logging

import torch

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.ir import Program
from megatron.fold3d.plan.ops import BACK, COMPUTE_OPS, FORTH, TO_DEVICE_OPS, TO_HOST_OPS
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.policy.offload_choice import OffloadTimes, choose_offload
from megatron.fold3d.runtime.device import free_device_bytes
from megatron.fold3d.runtime.measure.run_recorder import RunRecorder
from megatron.fold3d.runtime.offload.host_slots import HostSlots

logger = logging.getLogger(__name__)


class OffloadTuner:
    """Chooses one rank's offloads, in all iterations.

    Args:
        config: the configuration of the run; with ``--offload-activations auto`` no more
            leaves than the device's memory requires, as measured in the first two iterations.

    Attributes:
        recorder: times computations and copies; None once an iteration has been measured.
    """

    def __init__(self, config: Fold3DConfig, slots: HostSlots) -> None:
        self._device = torch.device(config.device)
        self._sparing = config.offload_activations == "auto"
        self._slots = slots
        self.recorder: RunRecorder | None = RunRecorder(self._device)
        self._measured: OffloadTimes | None = None
        # By the number of computations of an iteration, and whether sizes and times are known.
        self._chosen: dict[tuple[int, bool, bool], OffloadChoice] = {}
        self._num_iterations = 0

    def begin_iteration(self) -> None:
        """Begin an iteration; drop the times of the one before."""
        self._num_iterations += 1
        if self.recorder is not None:
            self.recorder.clear()

    def choose_for(self, program: Program, peak: int) -> OffloadChoice:
        """Return which of a program's activations to offload, and when.

        Args:
            peak: the most activations that the previous iteration held on the device.
        """
        if self.recorder is not None and self._num_iterations > 1:
            means_s = self.recorder.means_s(
                FORTH.compute, BACK.compute, *TO_HOST_OPS, *TO_DEVICE_OPS
            )
            if means_s is not None:
                sizes = self._slots.activation_bytes, peak, free_device_bytes(self._device)
                self._measured, self.recorder = OffloadTimes(*sizes, *means_s), None
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
        return self._chosen[key]
