"""What is predicted of a choice: the job that runs it, and its time."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A choice for iterations of some number of micro-batches.

    Attributes:
        job: what runs: with its shares, and in its order of computation.
        seconds: of an iteration whose step is neither clipped nor skipped; infinite if memory has
            no room.
    """

    job: Job
    seconds: float

    @property
    def choice(self) -> Choice:
        """The choice."""
        return self.job.choice


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a run's search has found.

    Attributes:
        choices: the choice that runs, then those worth trying.
        sharded: stock's order with the distributed optimizer, if that was asked for.
    """

    choices: Sequence[Predicted]
    sharded: Predicted | None = None
