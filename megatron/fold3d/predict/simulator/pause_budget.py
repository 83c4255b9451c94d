"""The budget of time for which messages of a NIC may pause its collectives."""

from collections.abc import Callable
from math import inf

from megatron.fold3d.predict.simulator.clock import SimulatedClock

WINDOW_S = 1.0


class PauseBudget:
    """The total time that pauses may last within a window of time.

    A window begins with the first pause after the previous window has ended.

    Args:
        share: the part of a window that may be spent in pauses.
        on_change: called with True when the budget is spent, and with False when it is renewed.
    """

    def __init__(
        self, clock: SimulatedClock, share: float, on_change: Callable[[bool], None]
    ) -> None:
        self.is_spent = False
        self._clock, self._on_change = clock, on_change
        self._budget_s = share * WINDOW_S
        self._left_s = 0.0
        self._window_ends_s = -inf
        self._since_s = inf  # the beginning of the current pause

    def pause(self, *, paused: bool) -> None:
        """Note whether collectives are being paused from now on."""
        now_s = self._clock.now_s
        if self._since_s < inf:
            self._left_s -= now_s - self._since_s
        self._since_s = now_s if paused else inf
        if not paused:
            return
        if now_s >= self._window_ends_s:
            self._left_s = self._budget_s
            self._window_ends_s = now_s + WINDOW_S
        self._clock.at(now_s + max(0.0, self._left_s), self._spend, now_s)

    def _spend(self, since_s: float) -> None:
        if self._since_s == since_s and not self.is_spent:  # else the pause has ended
            self._since_s = inf
            self._left_s = 0.0
            self._change(True)
            self._clock.at(max(self._clock.now_s, self._window_ends_s), self._renew, None)

    def _renew(self, _: None) -> None:
        self._window_ends_s = -inf
        self._change(False)

    def _change(self, is_spent: bool) -> None:
        self.is_spent = is_spent
        self._on_change(is_spent)
