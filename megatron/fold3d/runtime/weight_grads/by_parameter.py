"""The order of a stage's delayed weight gradients, if they are computed parameter by parameter.

    micro-batch by micro-batch   0W0: a b c     0W1: a b c      all complete at the end
    parameter by parameter       0W:500: b b a  0W:1000: a c c  b is complete behind 0W:500

Keeps one invariant: a parameter's gradients are added in the order of its micro-batches, so its sum
is the same bit for bit.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from megatron.fold3d.plan.ir import WHOLE, Program
from megatron.fold3d.plan.ops import PART_OPS, WEIGHT_OPS
from megatron.fold3d.policy.shard_order import in_turns
from megatron.fold3d.runtime.grad_sync.stage_gradients import spread


def by_parameter[Item](
    items: Iterable[Item],
    owner: Callable[[Item], Hashable],
    size: Callable[[Item], int],
    ends: Sequence[int],
    spread: Callable[[Item], Sequence[int]] = lambda _: (1,),
) -> list[list[tuple[Item, bool]]]:
    """Divide the work of all micro-batches into parts.

    The smallest parameters come first, so that the first DP.sync starts early. Among shards that
    are reduced together, the next parameter is one of the shard that has fewest gradients.

    Args:
        items: the work on one parameter, or on the parameters of one module, in one micro-batch;
            in the order of micro-batches.
        owner: the parameter or the module of an item.
        size: what an item costs.
        ends: where the parts end, in thousandths of the work; some parts may be empty.
        spread: how many gradients of an item's owner lie in each shard.

    Returns:
        The parts: their items, each with whether it is the last one of its owner.
    """
    of_owner: dict[Hashable, list[Item]] = {}
    for item in items:
        of_owner.setdefault(owner(item), []).append(item)
    of_owners = list(of_owner.values())
    order = in_turns([size(its[0]) for its in of_owners], [spread(its[0]) for its in of_owners])
    whole = sum(size(item) for its in of_owners for item in its)
    parts: list[list[tuple[Item, bool]]] = [[] for _ in ends]
    done = 0
    for its in map(of_owners.__getitem__, order):
        for left, item in zip(reversed(range(len(its))), its, strict=True):
            done += size(item)
            part = bisect_left(ends, done * WHOLE // max(1, whole))  # the one in which it ends
            parts[part].append((item, left == 0))
    return parts


class Turns:
    """The parts of the stages of a program that compute weight gradients by parameter.

    A part is handed over: what it needs is free when the caller has computed it.

    Args:
        program: the program of this rank.
        chunks: its model chunks, by segment.
        num_ranks: pipeline ranks.
    """

    def __init__(self, program: Program, chunks: Sequence[Any] = (), num_ranks: int = 1) -> None:
        self._chunks, self._num_ranks = chunks, num_ranks
        self._ends: dict[int, list[int]] = {}
        for action in program:
            if action.op in WEIGHT_OPS and action.op in PART_OPS:
                self._ends.setdefault(action.stage, []).append(action.end)
        self._parts: dict[int, deque[list[Any]]] = {}

    def spread(self, stage: int, parameters: Iterable[torch.Tensor]) -> Sequence[int]:
        """Return how many gradients of some parameters, of any shape, lie in each shard."""
        return spread(self._chunks[stage // self._num_ranks], frozenset(parameters))

    def next(self, stage: int, make: Callable[[Sequence[int]], Iterable[list[Any]]]) -> list[Any]:
        """Return what the next part of a stage computes; ``make`` divides the work at its ends."""
        if stage not in self._parts:
            self._parts[stage] = deque(make(self._ends[stage]))
        return self._parts[stage].popleft()
