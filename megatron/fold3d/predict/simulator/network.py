"""A fluid model of links that flows share: max-min fair, or PP.sync before DP.sync.

PP.sync may have priority always, or within a pause budget as in the preemptive communicator.
Without a budget, messages that fill a link would starve DP.sync.

Work is counted in seconds at the full rate of a NIC, so a NIC's capacity is one. A NIC is full
duplex and has two links. A message uses the sender's outgoing and the receiver's incoming link, a
collective both links of its NIC. A collective sends as fast as it receives, unless its rings are
buffered: then each direction has its own rate, and the slower one decides the end. There may be
links between switches (`Routes`), on which a flow takes the share of all flows that it represents.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from megatron.fold3d.predict.simulator.clock import SimulatedClock
from megatron.fold3d.predict.simulator.link import Use

if TYPE_CHECKING:
    from megatron.fold3d.predict.simulator.pause_budget import PauseBudget

_Way = tuple[tuple[int, ...], tuple[int, ...]]  # links, and the number of equal flows on each


@dataclass(slots=True, eq=False)
class Flow:
    """A transfer with one rate on all of its links; ``done(tag)`` is called at its end."""

    links: tuple[int, ...]
    """The sending NIC's outgoing link, the receiving NIC's incoming link, links of switches."""
    weights: tuple[int, ...]
    """For each link, the number of equal flows that this flow represents there."""
    remaining_s: float
    done: Callable[[Any], None]
    tag: Any = None
    is_collective: bool = False
    background: bool = False
    """Whether it takes only the bandwidth that messages leave."""
    rate: float = 0.0
    since_s: float = 0.0
    ends_s: float = inf
    """The time of its end if no flow starts or stops on its links."""


class Network:
    """The NICs, and the flows through them.

    Args:
        above: capacities of the links between switches, in multiples of a NIC's.
        preemptive: messages take all the bandwidth that they can use, and collectives share the
            rest; otherwise messages and collectives share fairly.
        pause_share: the part of the time for which messages may keep collectives off a NIC; after
            that, both share fairly.
        rings_are_buffered: whether a collective sends and receives at different rates. A collective
            through links between switches never does.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        num_nics: int,
        above: Sequence[float] = (),
        *,
        preemptive: bool,
        pause_share: float = 1.0,
        rings_are_buffered: bool = False,
    ) -> None:
        # Dicts as ordered sets: equal runs visit equal flows in equal order.
        self._clock = clock
        self._of_nics = 2 * num_nics  # links of NICs; links between switches follow
        self._capacity = *(1.0,) * self._of_nics, *above
        self._flows: list[dict[Flow, None]] = [{} for _ in range(self._of_nics + len(above))]
        self._background: list[dict[Flow, None]] = [{} for _ in range(num_nics)]
        self._preemptive = preemptive
        self._apart = rings_are_buffered
        has_budgets = preemptive and pause_share < 1
        self._budgets = self._pause_budgets(num_nics, pause_share) if has_budgets else []
        self._touched: dict[int, None] = {}

    def _pause_budgets(self, num_nics: int, share: float) -> "list[PauseBudget]":
        from megatron.fold3d.predict.simulator.pause_budget import PauseBudget

        each = (partial(self._make_equal, nic) for nic in range(num_nics))
        return [PauseBudget(self._clock, share, spent) for spent in each]

    def message(
        self,
        source: int,
        target: int,
        work_s: float,
        done: Callable[[Any], None],
        tag: Any,
        uses: Sequence[Use] = (),
    ) -> Flow:
        """Return the flow of a message from NIC to NIC, through links between switches."""
        return Flow(*self._way(2 * source, 2 * target + 1, uses), work_s, done, tag)

    def collective(
        self,
        nic: int,
        work_s: float,
        done: Callable[[Any], None],
        tag: Any,
        uses: Sequence[Use] = (),
    ) -> list[Flow]:
        """Return the flows of a collective, which sends and receives through one NIC.

        Returns:
            One flow through both links of the NIC, or a flow through each link. A flow that ends
            leaves the list, and ``done`` is called when the list is empty.
        """
        out, into = 2 * nic, 2 * nic + 1
        ways = [self._way(out, into, uses)]
        if self._apart and not uses:
            ways = [((out,), (1,)), ((into,), (1,))]

        def end(flow: Flow) -> None:
            flows.remove(flow)
            flow.tag = None  # a cycle of references would keep the run in memory
            if not flows:
                done(tag)

        flows = [Flow(*way, work_s, end, is_collective=True) for way in ways]
        for flow in flows:
            flow.tag = flow
        return flows

    def _way(self, out: int, into: int, uses: Sequence[Use]) -> _Way:
        """Return the links of a flow, and for each link the number of equal flows."""
        if not uses:
            return (out, into), (1, 1)
        above = (self._of_nics + use.link for use in uses)
        return (out, into, *above), (1, 1, *(use.flows for use in uses))

    def start_flow(self, flow: Flow) -> None:
        """Add a flow; `update_rates` sets its rate."""
        flow.since_s = self._clock.now_s
        nic = flow.links[0] >> 1
        equal = bool(self._budgets) and self._budgets[nic].is_spent
        flow.background = flow.is_collective and self._preemptive and not equal
        for flows in self._of(flow):
            flows[flow] = None
        self._touch(flow)

    def stop_flow(self, flow: Flow) -> None:
        """Remove a flow, which keeps its remaining work."""
        self._set_rate(flow, 0.0)
        for flows in self._of(flow):
            del flows[flow]
        self._touch(flow)

    def update_rates(self) -> None:
        """Recompute the rates on links where flows have started or stopped."""
        if not self._touched:
            return
        nics: dict[int, None] = {}
        touched, on_link = self._touched, self._flows
        while touched:
            link, _ = touched.popitem()
            if link < self._of_nics:
                nics[link >> 1] = None
            flows = on_link[link]
            if len(flows) == 1:
                (flow,) = flows
                ways = flow.links
                alone = len(on_link[ways[0]]) == 1 and len(on_link[ways[-1]]) == 1  # most are
                if alone and len(ways) <= 2:
                    nics[ways[0] >> 1] = nics[ways[-1] >> 1] = None
                    self._set_rate(flow, 1.0)
                    continue
            if flows:
                links, flows = self._component(link)
                for other in links:
                    touched.pop(other, None)
                    if other < self._of_nics:
                        nics[other >> 1] = None
                free = {each: self._capacity[each] for each in links}
                for flow, rate in _max_min(flows, free, on_link):
                    self._set_rate(flow, rate)
        if self._preemptive:
            self._share_rest()
        for nic in nics if self._budgets else ():
            sent = (flow for link in (2 * nic, 2 * nic + 1) for flow in self._flows[link])
            paused = bool(self._background[nic]) and any(flow.rate > 0 for flow in sent)
            self._budgets[nic].pause(paused=paused)

    def _share_rest(self) -> None:
        """Give collectives that yield to messages the bandwidth that messages leave."""
        yielding = dict.fromkeys(flow for flows in self._background for flow in flows)
        if not yielding:
            return
        free = list(self._capacity)
        for flow in dict.fromkeys(flow for flows in self._flows for flow in flows):
            for link, weight in zip(flow.links, flow.weights, strict=True):
                free[link] = max(0.0, free[link] - weight * flow.rate)
        on_link: list[list[Flow]] = [[] for _ in free]
        for flow in yielding:
            for link in flow.links:
                on_link[link].append(flow)
        for flow, rate in _max_min(yielding, dict(enumerate(free)), on_link):
            self._set_rate(flow, rate)

    def _make_equal(self, nic: int, equal: bool) -> None:
        """Let the collectives of a NIC share it with messages, or yield to them again."""
        of_nic = [*self._background[nic], *self._flows[2 * nic], *self._flows[2 * nic + 1]]
        for flow in dict.fromkeys(flow for flow in of_nic if flow.is_collective):
            for flows in self._of(flow):
                del flows[flow]
            flow.background = not equal
            for flows in self._of(flow):
                flows[flow] = None
            self._touch(flow)

    def _of(self, flow: Flow) -> tuple[dict[Flow, None], ...]:
        if flow.background:
            return (self._background[flow.links[0] >> 1],)
        return tuple([self._flows[link] for link in flow.links])

    def _touch(self, flow: Flow) -> None:
        for link in flow.links:
            self._touched[link] = None

    def _component(self, link: int) -> tuple[dict[int, None], dict[Flow, None]]:
        """Return the links that flows connect with this link, and all flows on them."""
        links: dict[int, None] = {link: None}
        flows: dict[Flow, None] = {}
        queue = [link]
        while queue:
            for flow in self._flows[queue.pop()]:
                flows[flow] = None
                for other in flow.links:
                    if other not in links:
                        links[other] = None
                        queue.append(other)
        return links, flows

    def _set_rate(self, flow: Flow, rate: float) -> None:
        if rate == flow.rate:
            return
        now_s = self._clock.now_s
        flow.remaining_s = max(0.0, flow.remaining_s - flow.rate * (now_s - flow.since_s))
        flow.since_s = now_s
        flow.rate = rate
        flow.ends_s = now_s + flow.remaining_s / rate if rate > 0 else inf
        if rate > 0:
            self._clock.at(flow.ends_s, self._end, flow)

    def _end(self, flow: Flow) -> None:
        if flow.ends_s == self._clock.now_s and flow.rate > 0:  # else a new rate moved the end
            flow.remaining_s = 0.0
            self.stop_flow(flow)
            flow.done(flow.tag)


def _max_min(
    flows: dict[Flow, None], free: dict[int, float], on_link: Sequence[Iterable[Flow]]
) -> Iterator[tuple[Flow, float]]:
    """Yield max-min fair rates; flows of the fullest links come first, with equal shares.

    Args:
        flows: each flow is removed after it is yielded.
        free: by link, the bandwidth to share; reduced by each yielded rate.
    """
    count = dict.fromkeys(free, 0)
    for flow in flows:
        for link, weight in zip(flow.links, flow.weights, strict=True):
            count[link] += weight
    while flows:
        shares = [(free[link] / n, link) for link, n in count.items() if n]
        rate, _ = min(shares)
        for share, bottleneck in shares:
            if share == rate:
                for flow in on_link[bottleneck]:
                    if flow in flows:
                        yield flow, rate
                        del flows[flow]
                        for link, weight in zip(flow.links, flow.weights, strict=True):
                            free[link] = max(0.0, free[link] - weight * rate)
                            count[link] -= weight
