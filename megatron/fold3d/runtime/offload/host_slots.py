"""Slots of host memory for one rank's activations: as many and as large as its program needs.

The first micro-batch of a stage shows how much the stage saves; all its slots are allocated then.
"""

import logging
from dataclasses import replace

import torch

from megatron.fold3d.plan.ir import Program
from megatron.fold3d.plan.memory import peak_on_host
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.policy.offload_choice import CAUTION, offloaded
from megatron.fold3d.runtime.offload import host_memory
from megatron.fold3d.runtime.offload.pinned_pool import PinnedPool

logger = logging.getLogger(__name__)


class HostSlots:
    """The host memory that receives offloaded activations.

    Args:
        device: the device that copies to this memory and from it.
        sparing: take no more than the host has free; otherwise too little memory is an error.
        saved_bytes: estimated bytes that one micro-batch's forward of a stage saves.
        num_local: the number of ranks on this node, which share its memory.

    Attributes:
        pool: the pinned memory pool.
    """

    def __init__(
        self, device: torch.device, *, sparing: bool, saved_bytes: int, num_local: int
    ) -> None:
        self.pool = PinnedPool(device)
        self._sparing = sparing
        self._saved_bytes = saved_bytes
        self._num_local = num_local
        self._bytes_of_stage: dict[int, int] = {}
        self._program: Program = ()

    @property
    def activation_bytes(self) -> int:
        """The bytes of the largest known stage's activations of one micro-batch; 0 if none is."""
        return max(self._bytes_of_stage.values(), default=0)

    def knows_stage(self, stage: int) -> bool:
        """Return True once a micro-batch has shown how much a stage saves."""
        return stage in self._bytes_of_stage

    def reserve_program(self, program: Program) -> None:
        """Reserve the slots that a program needs, for stages whose sizes are known.

        Raises:
            HostMemoryError: the host has less memory than the program takes.
        """
        self._program = program
        self._reserve()

    def learn_stage(self, stage: int, num_bytes: int) -> None:
        """Reserve all slots of a stage when its first micro-batch shows their size.

        Raises:
            HostMemoryError: the host has less memory than the program takes.
        """
        if self._bytes_of_stage.get(stage, 0) < num_bytes:
            self._bytes_of_stage[stage] = num_bytes
            self._reserve()

    def has_room(self, num_bytes: int) -> bool:
        """Return True if a slot is free, or if the pool may grow: not with ``sparing``."""
        return not self._sparing or self.pool.has_free(num_bytes)

    def fit_choice(self, computations: Program, choice: OffloadChoice) -> OffloadChoice:
        """Return the choice, reduced to what the host has memory for if ``sparing``."""
        largest = self.activation_bytes or self._saved_bytes
        if not self._sparing or not largest:
            return choice
        room = (self._room_bytes() + self.pool.num_bytes) // largest
        sizes = dict.fromkeys((action.stage for action in computations), largest)
        needed = peak_on_host(offloaded(computations, choice), sizes).total()
        if needed <= room:
            return choice
        logger.warning(
            "--offload-activations auto: %d activations of %s bytes should leave, the host has "
            "memory for %d; the others stay on the device",
            *(needed, f"{largest:,}", room),
        )
        return replace(choice, at_most=room)

    def _reserve(self) -> None:
        """Reserve all slots that the program needs; with ``sparing`` those that there is room for.

        Raises:
            HostMemoryError: the host has less memory than the program takes.
        """
        slots = peak_on_host(self._program, self._bytes_of_stage)
        lacking = self.pool.reserve(slots, self._room_bytes() if self._sparing else None)
        if lacking:
            logger.warning(
                "--offload-activations auto: the host has memory for %d of %d activations that "
                "should be there at once; the others stay on the device",
                *(slots.total() - lacking, slots.total()),
            )

    def _room_bytes(self) -> int:
        """Return this rank's share of the host memory that is still available to its node."""
        return int(host_memory.available_bytes() * CAUTION) // self._num_local
