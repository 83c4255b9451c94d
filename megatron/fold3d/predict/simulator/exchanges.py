"""Experts' all-to-alls between nodes, which share NICs with messages and DP.sync.

They go one after the other, and one is over when a rank has sent and received. A computation waits
for each of its own. Those of a pair of micro-batches run beside it, and it ends when all are over.
With a NIC of their own they take the seconds of the costs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.predict.simulator.clock import SimulatedClock
from megatron.fold3d.predict.simulator.network import Network


class Exchange(NamedTuple):
    """What a computation sends to experts and back."""

    share: float
    """Of the computation's seconds, those at the full rate of a NIC."""
    number: int
    """All-to-alls, of equal seconds."""
    beside: bool
    """Whether they run beside the computation."""


class Exchanges:
    """Runs computations, and the all-to-alls of those that have any.

    Args:
        clock: the run's.
        network: the NICs.
        nics: of each rank.
        of_actions: what computations send to experts of other nodes.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        network: Network,
        nics: Sequence[int],
        of_actions: Mapping[Action, Exchange],
    ) -> None:
        self._clock, self._network, self._nics = clock, network, nics
        self._of_actions = of_actions

    def run(
        self, rank: int, action: Action, seconds: float, done: Callable[[Any], None], tag: Any
    ) -> None:
        """Begin an action that takes so many ``seconds``; call ``done`` with ``tag`` at its end."""
        exchange = self._of_actions.get(action)
        if exchange is None:
            self._clock.at(self._clock.now_s + seconds, done, tag)
            return
        share, number, beside = exchange
        sent_s, computed_s = share * seconds / number, (1 - share) * seconds / number
        running = 1 + beside

        def end(_: None) -> None:
            nonlocal running
            running -= 1
            if not running:
                done(tag)

        def compute(left: int) -> None:
            if not left:
                end(None)
            elif beside:
                send(left)
            else:
                self._clock.at(self._clock.now_s + computed_s, send, left)

        def send(left: int) -> None:
            nic = self._nics[rank]  # and that of a replica, whose links are as full
            self._network.start_flow(self._network.message(nic, nic, sent_s, compute, left - 1))

        if beside:
            self._clock.at(self._clock.now_s + seconds, end, None)
        compute(number)
