"""The order of a stage's delayed weight gradients, if they are computed parameter by parameter.

    micro-batch by micro-batch   0W0: a b c   0W1: a b c    all complete at the end
    parameter by parameter       0W0: b b a   0W1: a c c    b is complete behind 0W0

Keeps one invariant: a parameter's gradients are added in the order of its micro-batches, so its sum
is the same bit for bit.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from megatron.fold3d.plan.ir import Op, Program
from megatron.fold3d.plan.passes.early_grad_sync import early_stages


def by_parameter[Item](
    items: Iterable[Item],
    owner: Callable[[Item], Hashable],
    size: Callable[[Item], int],
    num_parts: int,
) -> list[list[tuple[Item, bool]]]:
    """Divide the work of all micro-batches into parts that take about equally long.

    The smallest parameters come first, so that the first DP.sync starts early.

    Args:
        items: the work on one parameter, or on the parameters of one module, in one micro-batch;
            in the order of micro-batches.
        owner: the parameter or the module of an item.
        size: what an item costs.
        num_parts: how many parts there are; some may be empty.

    Returns:
        The parts: their items, each with whether it is the last one of its owner.
    """
    of_owner: dict[Hashable, list[Item]] = {}
    for item in items:
        of_owner.setdefault(owner(item), []).append(item)
    in_order = sorted(of_owner.values(), key=lambda its: size(its[0]))
    whole = sum(size(item) for its in in_order for item in its)
    parts: list[list[tuple[Item, bool]]] = [[] for _ in range(num_parts)]
    done = 0
    for its in in_order:
        for left, item in zip(reversed(range(len(its))), its, strict=True):
            done += size(item)
            part = parts[-(-done * num_parts // max(1, whole)) - 1]  # the one in which it ends
            part.append((item, left == 0))
    return parts


class Turns:
    """The parts of the stages of a program that compute weight gradients by parameter.

    A part is handed over: what it needs is free when the caller has computed it.
    """

    def __init__(self, program: Program) -> None:
        self.stages = early_stages(program)
        self._num_weights = {
            stage: sum(a.op is Op.WEIGHT and a.stage == stage for a in program)
            for stage in self.stages
        }
        self._parts: dict[int, deque[list[Any]]] = {}

    def next(self, stage: int, make: Callable[[int], Sequence[list[Any]]]) -> list[Any]:
        """Return what the next WEIGHT of a stage computes; ``make`` returns a number of parts."""
        if stage not in self._parts:
            self._parts[stage] = deque(make(self._num_weights[stage]))
        return self._parts[stage].popleft()
