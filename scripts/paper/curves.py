"""Loss curves of a small GPT on real text by system, as in Figs. 12a, 12c and 14.

`train_curves` trains it, and `curves.json` keeps what its last run measured.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from megatron.fold3d.commands.pictures import plot_losses
from scripts.paper.draw import by_system, can_draw

FILE = Path(__file__).with_name("curves.json")
TARGET = 2.9
"""The loss that all systems are timed to, as a mean of `_SMOOTHED` iterations."""
_SMOOTHED = 10


@dataclass(frozen=True, slots=True)
class Curve:
    """A system's training: what each iteration took, and the loss that it began with."""

    times_ms: list[float]
    losses: list[float]

    def points(self) -> list[tuple[float, float]]:
        """Return seconds of training so far, and the mean loss of the last iterations then."""
        seconds = [ms / 1e3 for ms in accumulate(self.times_ms)]
        return [
            (seconds[i], fmean(self.losses[i + 1 - _SMOOTHED : i + 1]))
            for i in range(_SMOOTHED - 1, len(seconds))
        ]

    def seconds_to(self, loss: float) -> float | None:
        """Return when the mean loss is first as low; None if it never is."""
        return next((time_s for time_s, found in self.points() if found <= loss), None)


def stored() -> dict[str, Curve]:
    """Return the curves of the run that is kept, by system."""
    return {name: Curve(**found) for name, found in json.loads(FILE.read_text()).items()}


def picture(curves: Mapping[str, Curve]) -> bytes:
    """Return the SVG of losses over iterations and over time; empty without matplotlib."""
    if not can_draw():
        return b""
    over_time = {name: curves[name].points() for name in by_system(curves)}
    over_steps = {
        name: [(n, loss) for n, (_, loss) in enumerate(points, _SMOOTHED)]
        for name, points in over_time.items()
    }
    title = "Loss of a small GPT on real text, measured"
    return plot_losses(title, {"iteration": over_steps, "seconds": over_time})
