"""Loss curves of a small GPT on real text by system, as in Figs. 12a, 12c and 14, and their times.

`train_curves` trains it, and `curves.json` keeps what its last run measured.
"""

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from megatron.fold3d.commands.pictures import Lines
from megatron.fold3d.observe.exposure import Exposure
from scripts.paper.draw import by_system
from scripts.paper.points import A100_39B, Iteration, Point, Times, against_megatron, gain
from scripts.paper.results import Grid, Number, Result, claims
from scripts.paper.tables import predicted

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


def lines() -> dict[str, Lines]:
    """Return the losses of the run that is kept, over iterations and over time."""
    curves = stored()
    over_time = {name: curves[name].points() for name in by_system(curves)}
    over_steps = {
        name: [(n, loss) for n, (_, loss) in enumerate(points, _SMOOTHED)]
        for name, points in over_time.items()
    }
    return {"iteration": over_steps, "seconds": over_time}


def times_to_a_loss() -> Grid:
    """Return when each system of the kept run of a small GPT reached one loss."""
    seconds = {name: curve.seconds_to(TARGET) for name, curve in stored().items()}
    base = seconds["megatron"]
    numbers = [Number(name, "s", found) for name, found in seconds.items()]
    if base:
        numbers += [
            Number(name, "% of megatron's", 100 * found / base)
            for name, found in seconds.items()
            if found is not None
        ]
    return Grid(title=f"Measured time to a loss of {TARGET}, small GPT", numbers=tuple(numbers))


def _of_table(point: Point, name: str) -> Iteration:
    """Return the iteration of a row of Table II, which has this point."""
    system = {"fold3d": "Fold3D", "megatron": "Megatron-SP"}[name]
    _, columns = predicted("A100x128", "GPT-3 39B", system)
    return Iteration(parts=Exposure(forward_s=columns["iteration_ms"] / 1e3))


def fig14(times: Times = _of_table) -> Result:
    """Fig. 14: the time to a loss, which is that of as many iterations."""
    ratio = gain(times, A100_39B)
    less = None if ratio is None else 1 - 1 / ratio
    claim = ("time that FOLD3D saves, %", 23.7, None if less is None else less * 100)
    bars = tuple(
        against_megatron("GPT-3 39B", name, times, A100_39B, name, lambda part: 100 * part, said)
        for name, said in (("fold3d", 76.3), ("megatron", 100.0))
    )
    title = "% of Megatron's time to the same loss"
    grid = Grid(title=title, numbers=bars, drawn=("fold3d", "megatron"))
    return Result(
        name="fig14",
        title="Fig. 14, time to a loss, GPT-3 39B on 128 A100",
        grids=(grid, claims(claim), times_to_a_loss()),
        curves=lines(),
        notes=(
            "the curves follow from no simulation, and need training of GPT-3 39B: ours are of a "
            "small GPT (curves.py); that losses are equal is tested bit for bit, "
            "tests/end_to_end/test_equal_to_stock.py",
        ),
    )
