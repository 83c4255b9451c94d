"""Training runs and how two of them compare: speed, losses, and where the time went.

A run is read from Megatron's log, our traces, or both in one folder.
"""

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from pathlib import Path
from random import Random
from statistics import median

from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.observe.trace_timeline import read_trace
from megatron.fold3d.observe.training_log import LoggedIteration, parse

_LOGS = ("*.log", "*.out", "*.txt")
_RESAMPLES = 2000
_MOST_TIMES = 500  # iterations to resample, the last ones of a longer run


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run.

    Attributes:
        name: the name to print.
        iterations: lines of its log, each iteration once, in order.
        timeline: the timeline of its traced iterations, if there are any.
    """

    name: str
    iterations: tuple[LoggedIteration, ...]
    timeline: Timeline | None

    def times_s(self, warmup: int) -> list[float]:
        """Seconds of each iteration but the first ones."""
        return [row.elapsed_ms / 1e3 for row in self.iterations if row.number > warmup]

    def losses(self) -> dict[int, float]:
        """The loss of each iteration that has one."""
        return {row.number: row.loss for row in self.iterations if row.loss is not None}

    def loss_over_time(self) -> list[tuple[float, float]]:
        """Return seconds spent in iterations so far, and the loss then."""
        before = (0, *(row.number for row in self.iterations))
        seconds = (
            (row.number - last) * row.elapsed_ms / 1e3  # a line stands for all since the one before
            for row, last in zip(self.iterations, before, strict=False)
        )
        return [
            (time_s, row.loss)
            for row, time_s in zip(self.iterations, accumulate(seconds), strict=True)
            if row.loss is not None
        ]


@dataclass(frozen=True, slots=True)
class Ratio:
    """The speed of one run relative to another's, with a 95% interval."""

    value: float
    low: float
    high: float


def read_run(path: Path, name: str) -> Run:
    """Return the run recorded in a log file, or in a folder with logs and traces.

    If a folder has no logs, the logs beside it count: those of its name or, for a folder ``trace``,
    all in its parent.

    Raises:
        ValueError: the path has no record of a run.
        OSError: the path cannot be read.
    """
    files = [path]
    if path.is_dir():
        files = _logs(path, _LOGS) or _logs_beside(path.absolute())
    iterations: dict[int, LoggedIteration] = {}
    for file in files:
        # An iteration that ran again after a restart counts as in its last run.
        for row in parse(file.read_text(encoding="utf-8", errors="replace")):
            iterations[row.number] = row
    traces = [folder for folder in (path, path / "trace") if any(folder.glob("rank-*.json"))]
    if not iterations and not traces:
        raise ValueError(
            f"{path}: found no line with 'elapsed time per iteration' and no trace; give the "
            "output of a training run, or a folder with it and what --trace wrote"
        )
    ordered = tuple(iterations[number] for number in sorted(iterations))
    return Run(name=name, iterations=ordered, timeline=read_trace(traces[0]) if traces else None)


def _logs(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted(found for pattern in patterns for found in folder.glob(pattern))


def _logs_beside(folder: Path) -> list[Path]:
    of_name = [pattern.replace("*", glob.escape(folder.name)) for pattern in _LOGS]
    return _logs(folder.parent, _LOGS if folder.name == "trace" else of_name)


def speed_ratio(first: Run, second: Run, warmup: int) -> Ratio:
    """Return by how much the second run's samples per second exceed the first's.

    If a line does not give its number of samples, all iterations count as equally large.

    The ratio is of medians. The interval is a 95% bootstrap over iterations: it covers the scatter
    within a run, not the scatter between two runs of one job.
    """
    timed = [[row for row in run.iterations if row.number > warmup] for run in (first, second)]
    sized = all(row.batch_size for rows in timed for row in rows)
    rates = [
        [(row.batch_size or 0.0 if sized else 1.0) / row.elapsed_ms for row in rows[-_MOST_TIMES:]]
        for rows in timed
    ]
    random = Random(0)  # equal input, equal interval

    def drawn(rate: Sequence[float]) -> float:
        return median(random.choices(rate, k=len(rate)))

    ratios = sorted(drawn(rates[1]) / drawn(rates[0]) for _ in range(_RESAMPLES))
    low, high = (ratios[round(share * (_RESAMPLES - 1))] for share in (0.025, 0.975))
    return Ratio(median(rates[1]) / median(rates[0]), low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossAgreement:
    """The differences of two runs' losses, iteration by iteration.

    Attributes:
        common: iterations that have a loss in both.
        equal: how many of these are equal in every digit that was logged.
        first_difference: the first that is not.
        largest: the largest relative difference.
    """

    common: int
    equal: int
    first_difference: int | None
    largest: float


def compare_losses(first: Run, second: Run) -> LossAgreement:
    """Compare the losses of the iterations that both runs logged."""
    ours, theirs = first.losses(), second.losses()
    common = sorted(ours.keys() & theirs.keys())
    off = {n: abs(ours[n] - theirs[n]) / (abs(ours[n]) or 1.0) for n in common}
    differing = [n for n in common if ours[n] != theirs[n]]
    return LossAgreement(
        common=len(common),
        equal=len(common) - len(differing),
        first_difference=differing[0] if differing else None,
        largest=max((inf if gap != gap else gap for gap in off.values()), default=0.0),
    )


def time_to_loss(run: Run, loss: float) -> float | None:
    """Return after how many seconds a run first reached a loss; None if it never did."""
    return next((time_s for time_s, found in run.loss_over_time() if found <= loss), None)
