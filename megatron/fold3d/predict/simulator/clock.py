"""A clock that jumps from one event to the next."""

import heapq
from collections.abc import Callable
from typing import Any


class SimulatedClock:
    """Simulated time in seconds, and the queue of future events."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._planned = 0

    def at(self, time_s: float, happen: Callable[[Any], None], argument: Any) -> None:
        """Schedule an event; events of equal time happen in the order of their scheduling."""
        self._planned += 1
        heapq.heappush(self._events, (time_s, self._planned, happen, argument))

    def run(self, between: Callable[[], None]) -> None:
        """Run all events; call ``between`` whenever the clock is about to move."""
        between()
        events, pop = self._events, heapq.heappop
        while events:
            now_s = self.now_s = events[0][0]
            while events and events[0][0] == now_s:
                _, _, happen, argument = pop(events)
                happen(argument)
            between()
