"""The state that Megatron keeps once per process, of which two micro-batches need a copy each.

Keeps one invariant: the other micro-batch, which runs during a collective of a forward or backward,
does not change this state for it.
"""

from dataclasses import dataclass
from typing import Any, Self

from megatron.core import parallel_state, utils
from megatron.core.tensor_parallel import random
from megatron.core.utils import GlobalMemoryBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """Megatron's globals at one moment.

    Attributes:
        memory_buffer: into which activations are gathered under sequence parallelism.
        is_checkpointing: whether a checkpointed function is running, or running again.
        random_name: the name of the random state that is in the generator.
        random_states: the states of the generators, and the named states that are in no generator.
        nvtx_ranges: the names of the profiler's ranges that are open.
    """

    memory_buffer: GlobalMemoryBuffer
    is_checkpointing: bool
    random_name: str
    random_states: tuple[Any, ...]
    nvtx_ranges: list[str]

    @classmethod
    def now(cls) -> Self:
        """Return the state as it is."""
        return cls(
            memory_buffer=parallel_state._GLOBAL_MEMORY_BUFFER,
            is_checkpointing=random.IS_CHECKPOINTING,
            random_name=random.get_cuda_rng_tracker()._current_state_name,
            random_states=random._get_all_rng_states(),
            nvtx_ranges=utils._nvtx_range_messages,
        )

    def restore(self) -> None:
        """Make the state what it was."""
        parallel_state._GLOBAL_MEMORY_BUFFER = self.memory_buffer
        random.IS_CHECKPOINTING = self.is_checkpointing
        random.get_cuda_rng_tracker()._current_state_name = self.random_name
        random._set_all_rng_states(*self.random_states)
        utils._nvtx_range_messages = self.nvtx_ranges
