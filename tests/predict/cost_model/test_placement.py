"""A pipeline whose nodes are simulated as one, against a simulation of every node.

`Ungrouped` shares no code with the simulator: it fills links of all nodes from the beginning at
each event, and knows a switch by the nodes below it.
"""

import re
from collections import Counter, defaultdict, deque
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.fold3d.observe.timeline import Lane
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.predict.cost_model.cluster import NODES, Cluster
from megatron.fold3d.predict.cost_model.placement import routes
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import NO_SWITCHES, Link, Use
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, planned


class Ungrouped:
    """Every node of every pipeline rank, and every link."""

    def __init__(self, plan: Plan, costs: Costs, cluster: Cluster, setup: Setup) -> None:
        self.plan, self.costs, self.cluster = plan, costs, cluster
        self.now_s, self.timers, self.flows = 0.0, [], []
        self.ends_s = defaultdict(dict)  # by cell: of each computation
        nodes = [self._nodes_of(setup, rank) for rank in range(plan.num_ranks)]
        self.rings = [[n for i, n in enumerate(of) if not i or n != of[i - 1]] for of in nodes]
        self.cells = [(rank, node) for rank, of in enumerate(nodes) for node in dict.fromkeys(of)]
        self.target = {
            ((rank, node), other): nodes[other][nodes[rank].index(node)]
            for rank, node in self.cells
            for other in range(plan.num_ranks)
        }
        self.position = dict.fromkeys(self.cells, 0)
        self.busy, self.arrived, self.synced = set(), set(), set()
        self.channels = defaultdict(deque)
        self.reductions = defaultdict(deque)  # of a cell: stages in the order of their start
        self.reducing = {}  # rank: stage

    def _nodes_of(self, setup: Setup, rank: int) -> list[int]:
        sizes = setup.tensor_parallel, setup.data_parallel, self.plan.num_ranks
        return [
            setup.tensor_parallel
            * (
                rank * sizes[1] + replica
                if setup.order == "tp-dp-pp"
                else replica * sizes[2] + rank
            )
            // self.cluster.gpus_per_node
            for replica in range(setup.data_parallel)
        ]

    def way(self, source: int, target: int) -> list[tuple]:
        links = [("out", source), ("in", target)]
        for level, below in enumerate(self.cluster.switch_nodes):
            if source // below != target // below:
                links += [("up", level, source // below), ("down", level, target // below)]
        return links

    def capacity(self, link: tuple) -> float:
        if link[0] not in ("up", "down"):
            return 1.0
        ratio = 1.0
        for each in self.cluster.oversubscription[: link[1] + 1]:
            ratio *= each
        return self.cluster.switch_nodes[link[1]] / ratio

    def run(self) -> float:
        while any(self.position[c] < len(self.plan.programs[c[0]]) for c in self.cells):
            while sum(map(self.step, self.cells)) or self.reduce():
                pass
            self.fill()
            left_s = [f["left_s"] / f["rate"] for f in self.flows if f["rate"]]
            waits_s = [time_s - self.now_s for time_s, _ in self.timers]
            assert left_s or waits_s or not self.pending(), "deadlock"
            if not (left_s or waits_s):
                break
            step_s = min(*left_s, *waits_s, inf, inf)
            self.now_s += step_s
            for flow in self.flows:
                flow["left_s"] -= flow["rate"] * step_s
            due = [f["done"] for f in self.flows if f["left_s"] <= 1e-12]
            self.flows = [f for f in self.flows if f["left_s"] > 1e-12]
            due += [done for time_s, done in self.timers if time_s <= self.now_s + 1e-12]
            self.timers = [t for t in self.timers if t[0] > self.now_s + 1e-12]
            for done in due:
                done()
        return self.now_s

    def pending(self) -> bool:
        return any(self.position[c] < len(self.plan.programs[c[0]]) for c in self.cells)

    def fill(self) -> None:
        """All rates rise together; a flow stops when one of its links is full."""
        rising = list(self.flows)
        for flow in rising:
            flow["rate"] = 0.0
        while rising:
            count = Counter(link for flow in rising for link in flow["links"])
            used = Counter()
            for flow in self.flows:
                for link in flow["links"]:
                    used[link] += flow["rate"]
            more = min((self.capacity(link) - used[link]) / n for link, n in count.items())
            for flow in rising:
                flow["rate"] += more
            full = {
                link
                for link, n in count.items()
                if self.capacity(link) - used[link] - more * n < 1e-9
            }
            rising = [flow for flow in rising if not full & set(flow["links"])]

    def step(self, cell: tuple[int, int]) -> bool:
        program = self.plan.programs[cell[0]]
        if cell in self.busy or self.position[cell] == len(program):
            return False
        stage, op, _ = action = program[self.position[cell]]
        last = self.plan.num_stages - 1
        if op is Op.ALL_REDUCE:
            self.reductions[cell].append(stage)
        elif op is Op.STEP:
            if stage not in self.synced:
                return False
        else:
            if op is Op.FORWARD and stage and (cell, action) not in self.arrived:
                return False
            if op is Op.BACKWARD and stage < last and (cell, action) not in self.arrived:
                return False
            self.busy.add(cell)
            by_op = {Op.FORWARD: self.costs.forward_s, Op.BACKWARD: self.costs.backward_s}
            self.timers.append((self.now_s + by_op[op][stage], lambda: self.computed(cell, action)))
            return False
        self.position[cell] += 1
        return True

    def computed(self, cell, action) -> None:
        self.busy.remove(cell)
        self.ends_s[cell][action] = self.now_s
        self.position[cell] += 1
        step = 1 if action.op is Op.FORWARD else -1
        stage = action.stage + step
        if not 0 <= stage < self.plan.num_stages:
            return
        rank = stage % self.plan.num_ranks
        other = rank, self.target[cell, rank]
        read = action._replace(stage=stage)
        if other[0] == cell[0]:
            self.arrived.add((other, read))
        elif other[1] == cell[1]:
            when_s = self.now_s + self.costs.p2p_latency_s + self.costs.p2p_local_s
            self.timers.append((when_s, lambda: self.arrived.add((other, read))))
        else:
            when_s = self.now_s + self.costs.p2p_latency_s
            self.timers.append((when_s, lambda: self.queue(cell, other, action.op, read)))

    def queue(self, cell, other, op, read) -> None:
        channel = self.channels[cell, other, op]
        channel.append(read)
        if len(channel) == 1:
            self.flow(cell, other, op, read)

    def flow(self, cell, other, op, read) -> None:
        def done() -> None:
            self.arrived.add((other, read))
            channel = self.channels[cell, other, op]
            channel.popleft()
            if channel:
                self.flow(cell, other, op, channel[0])

        links = self.way(cell[1], other[1])
        self.flows.append({"links": links, "left_s": self.costs.p2p_s, "rate": 0.0, "done": done})

    def reduce(self) -> bool:
        """Start a DP.sync where all nodes of a rank have come to it."""
        for rank, ring in enumerate(self.rings):
            heads = [self.reductions[rank, node] for node in dict.fromkeys(ring)]
            if rank in self.reducing or not all(heads):
                continue
            stage = self.reducing[rank] = heads[0][0]
            assert all(head[0] == stage for head in heads)

            def done(rank=rank, stage=stage, heads=heads) -> None:
                self.synced.add(stage)
                del self.reducing[rank]
                for head in heads:
                    head.popleft()

            links = [("alone", rank)]
            if len(set(ring)) > 1:
                links = [k for pair in pairwise([*ring, ring[0]]) for k in self.way(*pair)]
            elif not self.costs.grad_sync_local:
                links = [("out", ring[0]), ("in", ring[0])]
            left_s = self.costs.grad_sync_s[stage]
            self.flows.append({"links": links, "left_s": left_s, "rate": 0.0, "done": done})
            return True
        return False


def sizes(most: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in (1, 2, 4, 8) if n <= most])


seconds = st.floats(0.05, 4.0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nodes_that_are_alike_are_as_fast_as_one_of_them(data):
    draw = data.draw
    tp, dp, pp, per_node = draw(sizes(2)), draw(sizes(4)), draw(sizes(4)), draw(sizes(4))
    segments, microbatches = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    assume(tp * dp * pp >= 2 * per_node and tp <= per_node)
    cluster = replace(
        NODES["h100"],
        num_nodes=tp * dp * pp // per_node,
        gpus_per_node=per_node,
        switch_nodes=(below := draw(sizes(4)), 2 * below),
        oversubscription=(draw(st.floats(1, 6)), draw(st.floats(1, 6))),
    )
    order = draw(st.sampled_from(["tp-dp-pp", "tp-pp-dp"]))
    setup = Setup(tensor_parallel=tp, data_parallel=dp, order=order)
    stages = pp * segments
    per_stage = st.lists(seconds, min_size=stages, max_size=stages).map(tuple)
    together = tp * (dp if order == "tp-dp-pp" else 1)
    costs = Costs(
        forward_s=draw(per_stage),
        backward_s=draw(per_stage),
        grad_sync_s=draw(per_stage),
        p2p_s=draw(seconds),
        p2p_latency_s=draw(st.floats(0.0, 0.5)),
        p2p_local_s=draw(st.floats(0.0, 0.5)),
        grad_sync_local=tp * dp * (1 if order == "tp-dp-pp" else pp) <= per_node,
    )
    compute = built("aiao", pp, segments, microbatches)
    plan = planned(compute, transfers=False)
    link = Link(
        nic_of_rank=tuple(rank // max(1, per_node // together) for rank in range(pp)),
        routes=routes(cluster, setup, pp),
        preemptive=False,
    )
    timeline = simulate(plan, costs, link)
    every = Ungrouped(plan, costs, cluster, setup)
    assert every.run() == pytest.approx(timeline.period_s, rel=1e-9)
    for rank, node in every.cells:
        for span in timeline.lane(rank, Lane.COMPUTE):
            assert every.ends_s[rank, node][span.action] == pytest.approx(span.end_s, rel=1e-9)


POD = replace(
    NODES["h100"], name="pods", num_nodes=64, switch_nodes=(4, 16), oversubscription=(1.0, 4.0)
)


def test_links_that_carry_the_same_are_one():
    # A rank of 32 nodes fills two of four pods: all its messages leave them, 16 through each.
    found = routes(POD, Setup(tensor_parallel=8, data_parallel=32), 2)
    assert found.capacities == (4.0, 4.0, 4.0, 4.0)  # up and down, for either rank
    assert found.of(0, 1) == (Use(0, 16), Use(1, 16))
    assert found.of(1, 0) == (Use(2, 16), Use(3, 16))
    # Of its ring, one edge leaves each pod: beside the messages, of the same links.
    assert found.of(0, 0) == (Use(0, 1), Use(3, 1))


def test_links_that_carry_all_that_nics_send_are_left_out():
    equal = replace(POD, oversubscription=(1.0, 1.0))
    assert routes(equal, Setup(tensor_parallel=8, data_parallel=32), 2) is NO_SWITCHES
    # Pipelines inside a pod: rings alone leave it, and four of them fit through.
    inside = Setup(tensor_parallel=8, data_parallel=16, order="tp-pp-dp")
    assert not routes(POD, inside, 4).capacities


def test_nodes_of_one_rank_that_differ_are_refused():
    odd = replace(POD, num_nodes=48, switch_nodes=(16,), oversubscription=(4.0,))
    with pytest.raises(ValueError, match=re.escape("tp 8 x pp 2 x dp 24 in the order tp-dp-pp")):
        routes(odd, Setup(tensor_parallel=8, data_parallel=24), 2)
