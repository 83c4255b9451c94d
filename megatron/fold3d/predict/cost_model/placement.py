"""The placement of a model's parts on nodes, and the links between switches that traffic takes.

Placement is Megatron's, see `estimate`. Nodes are numbered in the order of ranks, and a switch
connects neighbouring nodes. DP.sync is a ring over a rank's replicas in the order of their numbers.

The nodes of a pipeline rank are simulated as one node. This is exact if their messages take paths
with equal loads; otherwise `routes` raises.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.simulator.link import NO_SWITCHES, Routes, Use

_Flow = tuple[int, int]  # sending and receiving rank; a rank with itself is its DP.sync


class _Link(NamedTuple):
    """One direction of the link from a switch to the level above."""

    level: int
    direction: Literal["up", "down"]
    switch: int


class _Kind(NamedTuple):
    """All links of a level and a direction that carry the same load."""

    level: int
    direction: Literal["up", "down"]
    load: frozenset[tuple[_Flow, int]]


def routes(cluster: Cluster, setup: Setup, num_ranks: int) -> Routes:
    """Return the links between switches that the traffic of a pipeline takes.

    Links that are never scarcer than NICs are left out.

    Raises:
        ValueError: nodes of one pipeline rank have paths with different loads.
    """
    if not any(capacity < nodes for capacity, nodes in _levels(cluster)):
        return NO_SWITCHES
    nodes = _nodes(cluster.gpus_per_node, setup, num_ranks)
    levels = tuple(_levels(cluster))
    try:
        return _routes(nodes, levels, nic_of_rank(cluster, setup, num_ranks))
    except ValueError as error:
        raise ValueError(
            f"tp {setup.tensor_parallel} x pp {num_ranks} x dp {setup.data_parallel} in the order "
            f"{setup.order} on {cluster.name} with switches of "
            f"{', '.join(map(str, cluster.switch_nodes))} nodes: {error}; give sizes whose "
            "pipeline ranks fill switches evenly"
        ) from None


def _levels(cluster: Cluster) -> Iterator[tuple[float, int]]:
    """Yield, per level, the capacity of a switch's links upward in NICs, and its nodes below."""
    scarcer = 1.0
    for nodes, ratio in zip(cluster.switch_nodes, cluster.oversubscription, strict=True):
        scarcer *= ratio
        yield nodes / scarcer, nodes


def nic_of_rank(cluster: Cluster, setup: Setup, num_ranks: int) -> tuple[int, ...]:
    """Return the NIC that each pipeline rank uses."""
    per_node = max(1, cluster.gpus_per_node // gpus_together(setup))
    return tuple(rank // per_node for rank in range(num_ranks))


def gpus_together(setup: Setup) -> int:
    """Return how many neighbouring GPUs belong to one pipeline rank, before the next rank's."""
    together = setup.num_replicas if setup.order == "tp-dp-pp" else setup.context_parallel
    return setup.tensor_parallel * together


def _nodes(gpus_per_node: int, setup: Setup, num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the node of each replica, for each pipeline rank."""
    together = gpus_together(setup)
    inside = together // setup.tensor_parallel
    return tuple(
        tuple(
            ((group * num_ranks + rank) * together + i * setup.tensor_parallel) // gpus_per_node
            for group in range(setup.num_replicas // inside)
            for i in range(inside)
        )
        for rank in range(num_ranks)
    )


@lru_cache(maxsize=4096)
def _routes(
    nodes: tuple[tuple[int, ...], ...],
    levels: tuple[tuple[float, int], ...],
    nic_of_rank: tuple[int, ...],
) -> Routes:
    num_ranks = len(nodes)
    after = [*range(1, num_ranks), 0]  # the next rank

    def ways_of(sender: int, receiver: int) -> list[list[_Link]]:
        """Return, for each sending node of a rank, the links to its receiving node."""
        if sender == receiver:
            return [_ring(nodes[sender], levels)]
        pairs = dict.fromkeys(zip(nodes[sender], nodes[receiver], strict=True))
        return [[*_way(*pair, levels)] for pair in pairs]

    messages = [flow for pair in enumerate(after) for flow in (pair, pair[::-1])]
    syncs = [(rank, rank) for rank in range(num_ranks)]
    ways = {flow: ways_of(*flow) for flow in (*messages, *syncs)}
    loads: defaultdict[_Link, Counter[_Flow]] = defaultdict(Counter)
    for flow, flow_ways in ways.items():
        for way in flow_ways:
            for link in way:
                loads[link][flow] += 1
    kinds = {
        link: _Kind(link.level, link.direction, frozenset(load.items()))
        for link, load in loads.items()
    }
    scarce: dict[_Kind, int] = {}
    for kind in kinds.values():
        if kind not in scarce and _is_scarce(kind, levels, nic_of_rank):
            scarce[kind] = len(scarce)
    of_flow = {}
    for flow, flow_ways in ways.items():
        found = {tuple(k for link in way if (k := kinds[link]) in scarce) for way in flow_ways}
        if len(found) > 1:
            raise ValueError(
                f"nodes of pipeline rank {flow[0]} reach rank {flow[1]} through different switches"
            )
        used = dict.fromkeys(found.pop())
        if used:
            of_flow[flow] = tuple(Use(scarce[kind], dict(kind.load)[flow]) for kind in used)
    return Routes(tuple(levels[kind.level][0] for kind in scarce), of_flow)


def _ring(nodes: Sequence[int], levels: Sequence[tuple[float, int]]) -> list[_Link]:
    """Return the links that a ring over nodes takes, some of them several times."""
    ring = [node for i, node in enumerate(nodes) if i == 0 or node != nodes[i - 1]]
    return [link for pair in pairwise([*ring, ring[0]]) for link in _way(*pair, levels)]


def _way(source: int, target: int, levels: Sequence[tuple[float, int]]) -> Iterator[_Link]:
    for level, (_, below) in enumerate(levels):
        if source // below != target // below:
            yield _Link(level, "up", source // below)
            yield _Link(level, "down", target // below)


def _is_scarce(
    kind: _Kind, levels: Sequence[tuple[float, int]], nic_of_rank: Sequence[int]
) -> bool:
    """True if the NICs behind a link may send or receive more than it carries."""
    of_nic: dict[int, int] = {}
    for (sender, receiver), count in kind.load:
        nic = nic_of_rank[sender if kind.direction == "up" else receiver]
        of_nic[nic] = max(of_nic.get(nic, 0), count)
    return sum(of_nic.values()) > levels[kind.level][0]
