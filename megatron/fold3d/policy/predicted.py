"""What is predicted of a choice: the order that it runs in, its shares, and its time."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.ir import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A choice for iterations of some number of micro-batches.

    Attributes:
        choice: the choice.
        order: its order of computation, with the weight gradients that fill gaps.
        shares: by stage, the part of its sum that starts in its iteration; empty is all.
        seconds: of an iteration whose step is neither clipped nor skipped; infinite if memory has
            no room.
    """

    choice: Choice
    order: Plan
    shares: tuple[float, ...] = ()
    seconds: float


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a run's search has found.

    Attributes:
        choices: the choice that runs, then those worth trying.
        sharded: stock's order with the distributed optimizer, if that was asked for.
    """

    choices: Sequence[Predicted]
    sharded: Predicted | None = None
