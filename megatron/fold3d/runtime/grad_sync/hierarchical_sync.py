"""``--hierarchical-dp-sync``: DP.sync that sums inside nodes first, where replicas share nodes.

Keeps one invariant: all ranks exchange the names of their nodes and decide from these alone which
groups sum in this way. So all ranks make the same process groups in the same order.
"""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.utils import log_single_rank

from megatron.fold3d.runtime.feature import Feature, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import (
    Ranks,
    bucket_groups,
    connect,
    everyones_reducing_groups,
    group_of,
    ranks_of,
    set_group,
)
from megatron.fold3d.runtime.grad_sync.hierarchical_group import HierarchicalGroup, Levels

logger = logging.getLogger(__name__)


class HierarchicalSync(Feature):
    """Replaces the process groups of Megatron's buckets by groups that sum inside nodes first.

    Args:
        timeout: the timeout of a collective.
        traffic_class: the traffic class that marks the packets of DP.sync.
    """

    def __init__(self, timeout: timedelta, traffic_class: int | None) -> None:
        self._timeout = timeout
        self._traffic_class = traffic_class
        self._is_connected = False

    def prepare(self, iteration: Iteration) -> None:
        """Make the process groups at the start of the first training iteration."""
        if self._is_connected or not iteration.trains:
            return
        self._is_connected = True
        buckets = list(bucket_groups(*iteration.chunks))
        groups = everyones_reducing_groups(buckets)
        made = _connect_nodes(
            _nodes_of_groups(groups), iteration.device, self._timeout, self._traffic_class
        )
        for bucket_group in buckets:
            if (ranks := ranks_of(group_of(bucket_group))) in made:
                set_group(bucket_group, made[ranks])
        log_single_rank(logger, logging.INFO, "--hierarchical-dp-sync auto: %s", _found(made))


def connect_with_nodes(
    groups: list[Ranks],
    device: torch.device,
    timeout: timedelta,
    traffic_class: int | None = None,
) -> dict[Ranks, dist.ProcessGroup]:
    """Make a process group over each group of ranks, hierarchical wherever nodes allow it.

    All ranks of the job call this together, with the same ``groups``, as they do for `connect`.
    """
    nodes = _nodes_of_groups(groups)
    plain = [ranks for ranks in groups if not nodes[ranks]]
    made = connect(plain, device, timeout, traffic_class)
    return made | _connect_nodes(nodes, device, timeout, traffic_class)


def _connect_nodes(
    nodes_of_groups: Mapping[Ranks, list[Ranks]],
    device: torch.device,
    timeout: timedelta,
    traffic_class: int | None,
) -> dict[Ranks, dist.ProcessGroup]:
    """Make a `HierarchicalGroup` over each group with nodes; return those this rank is in."""
    made: dict[Ranks, dist.ProcessGroup] = {}
    for ranks, nodes in nodes_of_groups.items():
        if not nodes:
            continue
        lines = [*zip(*nodes, strict=True)]  # across nodes
        # One call for each, or groups of the same ranks would be one.
        levels = [connect(part, device, timeout, traffic_class) for part in (nodes, lines, nodes)]
        if dist.get_rank() in ranks:
            scattering, across, gathering = (group for its in levels for group in its.values())
            made[ranks] = HierarchicalGroup(
                ranks, Levels(scattering=scattering, across=across, gathering=gathering), device
            )
    return made


def _nodes_of_groups(groups: Sequence[Ranks]) -> dict[Ranks, list[Ranks]]:
    """Return `shared_nodes` of each group; all ranks of the job call this together.

    A node is named after its first rank, from torchrun's variables, or else after its host name.
    """
    local_rank = os.environ.get("LOCAL_RANK")
    own = socket.gethostname() if local_rank is None else str(dist.get_rank() - int(local_rank))
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, own)
    return {ranks: shared_nodes(ranks, names) for ranks in groups}


def shared_nodes(ranks: Ranks, node_of_ranks: Sequence[str]) -> list[Ranks]:
    """Return the ranks of a group by node, or an empty list if it cannot gain from its nodes.

    There is no gain if all ranks are on one node, or if no two share a node. The parts of a sum
    would not fit together if nodes had different numbers of ranks, or ranks that are not
    consecutive in the group.

    Args:
        ranks: the global ranks of the group.
        node_of_ranks: the node of each rank of the job.
    """
    nodes: dict[str, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(node_of_ranks[rank], []).append(rank)
    sizes = {len(its) for its in nodes.values()}
    fits = len(nodes) > 1 and len(sizes) == 1 and sizes != {1}
    in_order = [rank for its in nodes.values() for rank in its] == [*ranks]
    return [tuple(its) for its in nodes.values()] if fits and in_order else []


def _found(made: Mapping[Ranks, dist.ProcessGroup]) -> str:
    """Describe this rank's hierarchical groups, for the log."""
    if not made:
        return (
            "off, for replicas do not share nodes and span several, or nodes have different "
            "numbers of them"
        )
    several = (f"{len(ranks)} replicas inside nodes first" for ranks in made)
    return f"sums {' and '.join(several)}"
