"""The choices that a run tries for one number of micro-batches, and what is told of them."""

from collections.abc import Sequence
from math import inf

from megatron.fold3d.policy.predicted import Predicted

TIMED = 2  # iterations of each choice; the faster one counts


class Trial:
    """The choices for one number of micro-batches; equal on all ranks except for `times_s`.

    Attributes:
        choices: the first choice, then those to try.
        times_s: by choice, the times of its iterations that count, on this rank.
        measured_s: by choice, the fastest iteration of the slowest rank, once it is known.
        repeats: iterations of the choice that is tried, so far without a second time.
    """

    def __init__(self, choices: Sequence[Predicted], measured: object = "nothing") -> None:
        self.choices = choices
        self.times_s: list[list[float]] = [[] for _ in choices]
        self.measured_s = [inf] * len(choices)
        self.repeats = 0
        self._measured = measured

    def untimed(self, *, free: bool) -> list[int]:
        """Return the choices that have to be timed before one of them is chosen."""
        fitting = self._fitting(free=free)
        return [i for i in fitting if len(self.times_s[i]) < TIMED] if len(fitting) > 1 else []

    def current(self, *, free: bool) -> int:
        """Return the choice that runs now: what is not yet timed, or the fastest.

        Args:
            free: whether DP.sync may reach into the next iteration.
        """
        if untimed := self.untimed(free=free):
            return untimed[0]
        return min(self._fitting(free=free), key=self.measured_s.__getitem__)

    def table(self, flag: str, *, free: bool, after: int) -> str:
        """Return, line by line, what was measured, predicted, tried and kept.

        Args:
            flag: what leaves the choice to the run.
            free: whether DP.sync may reach into the next iteration.
            after: how many iterations the run has trained: `compare` counts those behind them.
        """
        kept = self.current(free=free)
        rows: list[Sequence[str]] = [("choice", "predicted", "took", "")]
        for i, one in enumerate(self.choices):
            notes = [f"kept after {after} iterations"] if i == kept else []
            if one.job.shares and one.choice.carries:
                shares = ", ".join(f"{share:.2f}" for share in one.job.shares)
                notes.append(f"shares of DP.sync behind a stage's backwards {shares}")
            if one.choice.carries and not free:
                notes.append("waits until steps are not clipped")
            times = (f"{s:.4g} s" if s < inf else "-" for s in (one.seconds, self.measured_s[i]))
            rows.append((str(one.choice), *times, "; ".join(notes)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        if len(self.choices) == 1:
            lines.append("nothing else that fits is predicted to be faster")
        return "\n  ".join([f"{flag} measured {self._measured}", *lines])

    def _fitting(self, *, free: bool) -> list[int]:
        """Return what may run; if all carry steps, what was predicted best, which then does not."""
        fitting = [i for i, one in enumerate(self.choices) if free or not one.choice.carries]
        return fitting or [min(1, len(self.choices) - 1)]
