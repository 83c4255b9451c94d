"""``pairs=on``: two threads that take turns at micro-batches; only the one with the baton runs.

Only the handler of a chain's last action does something: it runs all actions of the chain on two
sides. Each side takes the next action of the program: a transfer, a copy, or a computation, within
which the side hands over. So a rank starts its actions in the order of its program.

Keeps one invariant: one of the two threads runs at any moment, and the state that Megatron keeps
per process is the running thread's.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import torch
from megatron.core import parallel_state, utils
from megatron.core.tensor_parallel import random
from megatron.core.utils import GlobalMemoryBuffer

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.plan.ops import COPY_OPS, P2P_OPS
from megatron.fold3d.plan.passes.pairs import PAIRED_OPS, chains
from megatron.fold3d.runtime.device import make_current, on_current_stream
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration, note_place

_FIRST, _SECOND = 0, 1


# Megatron's globals, of which each of two micro-batches needs its own: the other one runs during a
# collective of a forward or backward.
_GLOBALS = (
    (parallel_state, "_GLOBAL_MEMORY_BUFFER"),  # where sequence parallelism gathers activations
    (random, "IS_CHECKPOINTING"),  # whether a checkpointed function is running, or running again
    (utils, "_nvtx_range_messages"),  # the names of the profiler's ranges that are open
)


def keep_state() -> Callable[[], None]:
    """Return a function that makes Megatron's state what it is now, that of random numbers too."""
    values = [getattr(owner, name) for owner, name in _GLOBALS]
    states = random._get_all_rng_states()
    in_generator = random.get_cuda_rng_tracker()._current_state_name

    def restore() -> None:
        for (owner, name), value in zip(_GLOBALS, values, strict=True):
            setattr(owner, name, value)
        random.get_cuda_rng_tracker()._current_state_name = in_generator
        random._set_all_rng_states(*states)

    return restore


class OtherFailedError(Exception):
    """Ends one side of a pair after the other has failed; never leaves `Baton.run`."""


class Baton(Feature):
    """Runs two functions in turn, on the calling thread and on a thread of its own.

    As a feature it runs the chains of a program; process groups of layers hand it over.
    """

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
        restore = keep_state()
        stream = on_current_stream(device)

        def run_second() -> None:
            self._turns[_SECOND].acquire()
            self._threads = (self._threads[_FIRST], threading.get_ident())
            if self._error is None:
                make_current(device)
                restore()
                parallel_state._GLOBAL_MEMORY_BUFFER = self._second_buffer
                utils._nvtx_range_messages = []
                with stream:
                    self._run(second)
            self._running[_SECOND] = False
            self._turns[_FIRST].release()

        self._pool.submit(run_second)
        self._run(first)
        restore_mine = keep_state()
        self._running[_FIRST] = False
        while self._running[_SECOND]:
            self._turns[_SECOND].release()
            self._turns[_FIRST].acquire()
        restore_mine()
        self._threads = (None, None)
        if self._error is not None:
            raise self._error

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return handlers that run chains."""
        by_last = {of_chain[-1]: of_chain for of_chain in chains(iteration.program)}
        chained = frozenset(chain.from_iterable(by_last.values()))

        def run(action: Action) -> None:
            try:
                inner[action.op](action)
            except Exception as error:
                note_place(error, iteration.rank, action)
                raise

        def handler(action: Action) -> None:
            if action in by_last:
                left = deque(by_last[action])

                def side() -> None:
                    while left:
                        run(left.popleft())

                self.run(side, side, iteration.device)
            elif action not in chained:
                run(action)

        return dict.fromkeys(PAIRED_OPS | P2P_OPS | COPY_OPS, handler)

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
            restore = keep_state()
            self._turns[other].release()
            self._turns[me].acquire()
            restore()
        if self._error is not None:
            raise OtherFailedError

    def close(self, error: BaseException | None = None) -> None:
        """End the thread of second micro-batches."""
        self._pool.shutdown(wait=False)

    def _run(self, function: Callable[[], None]) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                function()
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            if self._error is None:
                self._error = error
