"""The traffic of a run's ranks on the network: messages, DP.sync, and experts' all-to-alls.

All-to-alls between nodes share NICs with the other traffic. A computation's all-to-alls run one
after the other; each ends when the rank has sent and received. The computation waits for each of
them. In a pair of micro-batches they overlap the computation, which ends when all have ended. Alone
on a NIC, all-to-alls take the seconds of the costs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.predict.simulator.clock import SimulatedClock
from megatron.fold3d.predict.simulator.network import Flow, Network
from megatron.fold3d.predict.simulator.steps import Steps


class Traffic:
    """Starts messages and DP.sync, and runs computations, whose all-to-alls use the network.

    Attributes:
        network: the NICs, followed by a pair of links per rank for DP.sync that stays in the node.
    """

    def __init__(self, steps: Steps) -> None:
        costs, link, nics = steps.costs, steps.link, steps.nics
        self.clock, self._steps = SimulatedClock(), steps
        self._channels: defaultdict[tuple[int, int, Op], deque[Flow]] = defaultdict(deque)
        local_nics = range(1 + max(nics), 1 + max(nics) + len(nics))
        self._sync_nics: Sequence[int] = local_nics if costs.grad_sync_local else nics
        self.network = Network(
            self.clock,
            local_nics.stop,
            link.routes.capacities,
            preemptive=link.preemptive,
            pause_share=link.pause_share,
            rings_are_buffered=costs.rings_are_buffered,
        )

    def send(
        self, sender: int, receiver: int, op: Op, done: Callable[[Any], None], tag: Any
    ) -> None:
        """Send a message from rank to rank; call ``done`` with ``tag`` when it has arrived.

        After its latency the message flows through the NICs of both ranks. Messages of one op
        between two ranks flow one after the other, as in one communicator.
        """
        costs, link, nics = self._steps.costs, self._steps.link, self._steps.nics
        flows_s = self.clock.now_s + costs.p2p_latency_s
        source, target = nics[sender], nics[receiver]
        if source == target or not (costs.p2p_s and link.contended):
            alone_s = costs.p2p_local_s if source == target else costs.p2p_s
            self.clock.at(flows_s + alone_s, done, tag)
            return
        channel, uses = self._channels[sender, receiver, op], link.routes.of(sender, receiver)
        arrives = channel, done, tag
        flow = self.network.message(source, target, costs.p2p_s, self._arrive, arrives, uses)
        if costs.p2p_latency_s:
            self.clock.at(flows_s, self._queue, (channel, flow))
        else:
            self._queue((channel, flow))

    def _queue(self, message: tuple[deque[Flow], Flow]) -> None:
        channel, flow = message
        channel.append(flow)
        if len(channel) == 1:
            self.network.start_flow(flow)

    def _arrive(self, message: tuple[deque[Flow], Callable[[Any], None], Any]) -> None:
        channel, done, tag = message
        channel.popleft()
        if channel:
            self.network.start_flow(channel[0])
        done(tag)

    def sync(
        self, rank: int, seconds: float, done: Callable[[Any], None], tag: Any = None
    ) -> list[Flow]:
        """Return the flows of a rank's DP.sync, which takes ``seconds`` if it is alone."""
        uses = self._steps.link.routes.of(rank, rank)
        return self.network.collective(self._sync_nics[rank], seconds, done, tag, uses)

    def compute(
        self, rank: int, action: Action, seconds: float, done: Callable[[Any], None], tag: Any
    ) -> None:
        """Begin an action of ``seconds`` without contention; call ``done(tag)`` at its end."""
        exchange = self._steps.exchanges.get(action)
        if exchange is None:
            self.clock.at(self.clock.now_s + seconds, done, tag)
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
                self.clock.at(self.clock.now_s + computed_s, send, left)

        def send(left: int) -> None:
            nic = self._steps.nics[rank]  # stands for a replica's receiving NIC, equally loaded
            self.network.start_flow(self.network.message(nic, nic, sent_s, compute, left - 1))

        if beside:
            self.clock.at(self.clock.now_s + seconds, end, None)
        compute(number)
