"""Two threads that take turns: only the one that holds the baton runs.

Keeps one invariant: one of the two threads runs at any moment, and the state that Megatron keeps
per process is the running thread's.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from megatron.core import parallel_state, utils
from megatron.core.tensor_parallel import random
from megatron.core.utils import GlobalMemoryBuffer

from megatron.fold3d.runtime.device import make_current, on_current_stream

_FIRST, _SECOND = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """Megatron's globals at one moment: what it keeps once per process.

    Each of two micro-batches needs a copy, so that the other one, which runs during a collective of
    a forward or backward, does not change it.

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


class OtherFailedError(Exception):
    """Ends one side of a pair after the other has failed; never leaves `Baton.run`."""


class Baton:
    """Runs two functions in turn, on the calling thread and on a thread of its own."""

    def __init__(self) -> None:
        self._second_buffer = GlobalMemoryBuffer()
        self._pool = ThreadPoolExecutor(1, "second micro-batch of a pair")
        self._threads: tuple[int | None, int | None] = (None, None)
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._running = [False, False]
        self._error: BaseException | None = None

    def run(
        self, first: Callable[[], None], second: Callable[[], None], device: torch.device
    ) -> None:
        """Run ``first`` and ``second``; when one hands the baton over, the other continues.

        ``first`` begins. Each part of ``first`` between two hand-overs runs before the same part of
        ``second``. A backward runs entirely on the thread that starts it.

        Args:
            device: the device of both functions, which share the caller's stream.

        Raises:
            Exception: what ``first`` or ``second`` raised; the other function has ended by then.
        """
        self._threads = (threading.get_ident(), None)
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._running, self._error = [True, True], None
        before = ProcessState.now()
        stream = on_current_stream(device)

        def run_second() -> None:
            self._turns[_SECOND].acquire()
            self._threads = (self._threads[_FIRST], threading.get_ident())
            if self._error is None:
                make_current(device)
                replace(before, memory_buffer=self._second_buffer, nvtx_ranges=[]).restore()
                with stream:
                    self._run(second)
            self._running[_SECOND] = False
            self._turns[_FIRST].release()

        self._pool.submit(run_second)
        self._run(first)
        mine = ProcessState.now()
        self._running[_FIRST] = False
        while self._running[_SECOND]:
            self._turns[_SECOND].release()
            self._turns[_FIRST].acquire()
        mine.restore()
        self._threads = (None, None)
        if self._error is not None:
            raise self._error

    def side(self) -> int:
        """Return 1 on the thread of the second function while `run` runs, else 0."""
        return int(threading.get_ident() == self._threads[_SECOND])

    def hand_over(self) -> None:
        """Let the other side run until it hands the baton back or ends.

        Does nothing outside of `run`, and once the other side has ended.

        Raises:
            OtherFailedError: the other side has failed.
        """
        if threading.get_ident() not in self._threads:
            return
        me = self._threads.index(threading.get_ident())
        other = 1 - me
        if self._running[other] and self._error is None:
            kept = ProcessState.now()
            self._turns[other].release()
            self._turns[me].acquire()
            kept.restore()
        if self._error is not None:
            raise OtherFailedError

    def close(self) -> None:
        """End the second thread."""
        self._pool.shutdown(wait=False)

    def _run(self, function: Callable[[], None]) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                function()
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            if self._error is None:
                self._error = error
