"""Slots of host memory for one rank's activations: as many and as large as its program needs.

All memory is allocated between iterations. What the first one needs is estimated; its micro-batches
show how much each stage saves, and the second one begins with what that takes.
"""

import logging
from dataclasses import replace

import torch

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.ir import Program
from megatron.fold3d.plan.memory import peak_on_host
from megatron.fold3d.plan.ops import TO_HOST_OPS
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.policy.measured_times import usable_bytes
from megatron.fold3d.policy.offload_choice import offloaded
from megatron.fold3d.runtime.offload import host_memory
from megatron.fold3d.runtime.offload.pinned_pool import PinnedPool, aligned

logger = logging.getLogger(__name__)


class HostSlots:
    """The host memory that receives offloaded activations.

    With ``--offload-activations auto`` it takes no more than the host has free; with ``on`` too
    little memory is an error.

    Args:
        num_local: the number of ranks on this node, which share its memory.

    Attributes:
        bytes_of_stage: how much a micro-batch of a stage saves, of stages that have shown it.
    """

    def __init__(self, config: Fold3DConfig, num_local: int) -> None:
        self.pool = PinnedPool(torch.device(config.device))
        self._sparing = config.offload_activations == "auto"
        self._saved_bytes = config.saved_bytes
        self._first_bytes = config.activation_memory_bytes
        self._num_local = num_local
        self.bytes_of_stage: dict[int, int] = {}

    @property
    def activation_bytes(self) -> int:
        """The bytes of the largest known stage's activations of one micro-batch; 0 if none is."""
        return max(self.bytes_of_stage.values(), default=0)

    def reserve_program(self, program: Program) -> None:
        """Reserve the host memory that a program needs; with ``auto`` what there is room for.

        Raises:
            HostMemoryError: the host has less memory than the program takes.
        """
        room = self._room_bytes() if self._sparing else None
        if not self.bytes_of_stage:
            self._reserve_unknown(program, room)
            return
        before = self.pool.num_bytes
        slots = peak_on_host(program, self.bytes_of_stage)
        lacking = self.pool.reserve(slots, room)
        if lacking:
            logger.warning(
                "--offload-activations auto: the host has memory for %d of %d activations that "
                "should be there at once; the others stay on the device",
                *(slots.total() - lacking, slots.total()),
            )
        elif self.pool.num_bytes > before:
            logger.info(
                "offloaded activations have %s bytes of host memory from now on, %s until now: "
                "what found no room stayed on the device; --activation-memory-bytes %d gives all "
                "of it to the first iteration",
                *(f"{self.pool.num_bytes:,}", f"{before:,}", self.pool.num_bytes),
            )

    def learn_stage(self, stage: int, num_bytes: int) -> None:
        """Note how much a micro-batch of a stage saves, for the next iteration."""
        self.bytes_of_stage[stage] = max(num_bytes, self.bytes_of_stage.get(stage, 0))

    def fit_choice(self, computations: Program, choice: OffloadChoice) -> OffloadChoice:
        """Return the choice, reduced to what the host has memory for with ``auto``."""
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

    def _reserve_unknown(self, program: Program, room: int | None) -> None:
        """Reserve memory for a program whose activations have sizes that no iteration has shown."""
        wanted = self._first_bytes
        if wanted is None:
            sizes = {a.stage: aligned(self._saved_bytes) for a in program if a.op in TO_HOST_OPS}
            wanted = sum(size * count for size, count in peak_on_host(program, sizes).items())
        if num_bytes := wanted if room is None else min(wanted, room):
            self.pool.reserve_bytes(num_bytes)

    def _room_bytes(self) -> int:
        """Return this rank's share of the host memory that is still available to its node."""
        return int(usable_bytes(host_memory.available_bytes())) // self._num_local
