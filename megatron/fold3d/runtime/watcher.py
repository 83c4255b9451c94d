"""When a device passes what the host has launched: a thread of the host asks it every 0.1 ms.

CUDA's own means change what they measure. An event with timing behind a collective holds back what
is launched after it (pytorch#143890, TransformerEngine#1353). NCCL runs a callback at once, on a
stream of torch's pool that waits for the collective. Where streams share a hardware queue, both
stop computation.

Keeps one invariant: to ask launches nothing, and makes neither the host nor the device wait.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice

POLL_S = 1e-4
_MOST_LINES = 16  # asked at a time, the oldest first

IsOver = Callable[[], bool]
Then = Callable[[], None]


class Watcher:
    """Calls functions when what they wait for is over; its thread runs while anything is not.

    Args:
        begin: what the thread calls first, such as to make the device current.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._lines: dict[object, deque[tuple[IsOver, Then]]] = {}
        self._thread: threading.Thread | None = None

    @property
    def is_current(self) -> bool:
        """True in the watcher's own thread."""
        return threading.current_thread() is self._thread

    def when(self, line: object, is_over: IsOver, then: Then) -> None:
        """Call ``then`` in the watcher's thread when ``is_over`` returns True.

        Args:
            line: of what is over in the order of these calls, such as a stream's events.
            is_over: asks the device; it neither blocks nor launches anything.
            then: must not block.
        """
        with self._lock:
            self._lines.setdefault(line, deque()).append((is_over, then))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        self._begin()
        while True:
            with self._lock:
                lines = [*islice(self._lines.items(), _MOST_LINES)]
                if not lines:
                    self._thread = None
                    return
            for line, waiting in lines:
                self._ask(line, waiting)
            time.sleep(POLL_S)

    def _ask(self, line: object, waiting: deque[tuple[IsOver, Then]]) -> None:
        while waiting:
            is_over, then = waiting[0]
            if not is_over():
                return
            then()
            with self._lock:
                waiting.popleft()
                if not waiting:
                    del self._lines[line]
