"""Predictions: a choice's job and its predicted iteration time."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The predicted iteration of a choice, for a number of micro-batches.

    Attributes:
        job: the job with its shares and its order of computation.
        seconds: an iteration whose step is neither clipped nor skipped; infinite if memory has no
            room.
    """

    job: Job
    seconds: float

    @property
    def choice(self) -> Choice:
        """The choice."""
        return self.job.choice


@dataclass(frozen=True, slots=True)
class Predictions:
    """The result of a run's search.

    Attributes:
        choices: the running choice, then the choices worth trying.
        sharded: stock's order with the distributed optimizer, if it was to be predicted.
    """

    choices: Sequence[Predicted]
    sharded: Predicted | None = None
