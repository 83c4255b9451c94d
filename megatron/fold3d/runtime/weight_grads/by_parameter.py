"""What both ways of delaying weight gradients have in common, and the order of their parts.

    micro-batch by micro-batch   0W0: a b c     0W1: a b c      all complete at the end
    parameter by parameter       0W:500: b b a  0W:1000: a c c  b is complete behind 0W:500

Keeps one invariant: a parameter's gradients are added in the order of its micro-batches, and those
of several uses in one backward are added up before, so its sum is the same bit for bit.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron.fold3d.plan.ir import WHOLE, Action, Op, Program
from megatron.fold3d.plan.passes.weight_grads import split_stages
from megatron.fold3d.policy.shard_order import in_turns
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration, Key, within
from megatron.fold3d.runtime.grad_sync.stage_gradients import spread


def in_parts[Item](
    of_owners: Sequence[Sequence[Item]],
    sizes: Sequence[int],
    spreads: Sequence[Sequence[int]],
    ends: Sequence[int],
) -> list[list[tuple[Item, bool]]]:
    """Divide the work of all micro-batches into parts.

    The smallest parameters come first, so that the first DP.sync starts early. Among shards that
    are reduced together, the next parameter is one of the shard that has fewest gradients.

    Args:
        of_owners: for each parameter, or module, its work in each micro-batch, in their order.
        sizes: what one micro-batch's work of each costs.
        spreads: how many gradients of each lie in each shard.
        ends: where the parts end, in thousandths of the work; some parts may be empty.

    Returns:
        The parts: their items, each with whether it is the last one of its owner.
    """
    whole = sum(size * len(its) for size, its in zip(sizes, of_owners, strict=True))
    parts: list[list[tuple[Item, bool]]] = [[] for _ in ends]
    done = 0
    for owner in in_turns(sizes, spreads):
        for left, item in zip(
            reversed(range(len(of_owners[owner]))), of_owners[owner], strict=True
        ):
            done += sizes[owner]
            part = bisect_left(ends, done * WHOLE // max(1, whole))  # the one in which it ends
            parts[part].append((item, left == 0))
    return parts


class SplitBackwards[Item](Feature, ABC):
    """The backwards of one rank that leave their weight gradients to `W` and `W:` actions.

    An item is the work on one parameter, or on the parameters of one module, in one backward.
    What it needs is free once it has been computed.
    """

    def __init__(self) -> None:
        self._chunks: Mapping[int, torch.nn.Module] = {}  # by stage, those that are split
        self._kept: dict[Key, Iterable[Item]] = {}
        self._program: Program = ()
        self._parts: dict[int, deque[list[tuple[Item, bool]]]] = {}  # that they compute
        self._unfinished: dict[int, set[torch.Tensor]] = {}

    def prepare(self, iteration: Iteration) -> None:
        """Delay the gradients of the stages that have W or W: actions."""
        num_ranks = iteration.plan.num_ranks
        stages = split_stages(iteration.program)
        before, self._chunks = self._chunks, {s: iteration.chunks[s // num_ranks] for s in stages}
        if before.keys() != self._chunks.keys():
            self.choose(self._chunks)
        self._program, self._parts = iteration.program, {}
        self._unfinished = iteration.unfinished

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return the handlers: a BACKWARD keeps operands, W and W: compute the gradients."""
        stages = split_stages(iteration.program)

        def kept(action: Action) -> AbstractContextManager[None]:
            return self.keeping(action) if action.stage in stages else nullcontext()

        return {
            Op.BACKWARD: within(kept, inner[Op.BACKWARD]),
            Op.WEIGHT: self.compute,
            Op.WEIGHT_PART: self.compute_part,
        }

    @torch.no_grad()
    def compute(self, action: Action) -> None:
        """Compute one stage's weight gradients of a micro-batch; DDP's hooks accumulate them.

        They have the shapes of the parameters, and are computed on the current stream, in the dtype
        of the operands. DDP adds them to its ``main_grad`` buffers.
        """
        self._add(self._kept.pop((action.stage, action.microbatch)))

    @torch.no_grad()
    def compute_part(self, action: Action) -> None:
        """Compute a part of one stage's weight gradients of all micro-batches, as `compute` does.

        The part is that of some parameters: see `in_parts`.
        """
        stage = action.stage
        if stage not in self._parts:
            self._parts[stage] = deque(self._divide(stage))
        for item, is_last in self._parts[stage].popleft():
            self._add([item])  # alone: autograd would first add up what one call has for a weight
            if is_last:
                self._unfinished[stage].difference_update(self._parameters(item))

    @abstractmethod
    def choose(self, chunks: Mapping[int, torch.nn.Module]) -> None:
        """Delay weight gradients in the model chunk of each of these stages."""

    @abstractmethod
    def keeping(self, backward: Action) -> AbstractContextManager[None]:
        """Return a context in which a backward keeps the items of its weight gradients."""

    @abstractmethod
    def _parameters(self, item: Item) -> Sequence[torch.Tensor]:
        """Return the parameters of an item, of any shape."""

    @abstractmethod
    def _add(self, items: Iterable[Item]) -> None:
        """Compute and accumulate the gradients of some items."""

    def _divide(self, stage: int) -> list[list[tuple[Item, bool]]]:
        keys = [key for key in self._kept if key[0] == stage]  # in the order of backwards
        items = [item for key in keys for item in self._kept.pop(key)]
        self._unfinished[stage] = {p for item in items for p in self._parameters(item)}
        of_owners: dict[torch.Tensor, list[Item]] = {}
        for item in items:
            of_owners.setdefault(self._parameters(item)[0], []).append(item)
        owned = [self._parameters(its[0]) for its in of_owners.values()]
        return in_parts(
            [*of_owners.values()],
            [sum(parameter.numel() for parameter in its) for its in owned],
            [spread(self._chunks[stage], frozenset(its)) for its in owned],
            [a.end for a in self._program if a.op is Op.WEIGHT_PART and a.stage == stage],
        )
