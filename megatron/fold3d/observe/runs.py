"""Training runs and how they compare: speed, losses, and where the time went.

A run is read from Megatron's log, our traces, or both in one folder. Where it ran several times,
the folder has one for each time, ``round-1`` and so on.
"""

import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from math import inf
from pathlib import Path
from random import Random
from statistics import median

from megatron.fold3d.observe.breakdown import View, measured
from megatron.fold3d.observe.trace_files import pipeline, read_ranks
from megatron.fold3d.observe.trace_timeline import to_timeline
from megatron.fold3d.observe.training_log import (
    LoggedIteration,
    arguments,
    chosen_after,
    parse,
)

_LOGS = ("*.log", "*.out", "*.txt")
_RESUME = "resume"  # a file with the command that runs what is missing in a folder
_MODEL = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length"),
    *("vocab_size", "num_experts"),
)
_JOB = {**dict.fromkeys(_MODEL, "model"), "global_batch_size": "batch", "seed": "seed"}
_RESAMPLES = 2000
_MOST_TIMES = 500  # iterations to resample, the last ones of a longer run


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run, or several rounds of it.

    Attributes:
        rounds: the lines of its log, each iteration once, in order; for each time that it ran.
        warmup: how many of the first iterations are not timed, such as trials of ``auto``.
        traced: its traced iterations, if there are any.
        flags: the values of Megatron's flags that the log lists.
    """

    name: str
    rounds: tuple[tuple[LoggedIteration, ...], ...]
    warmup: int
    traced: View | None
    flags: Mapping[str, str] = field(default_factory=dict)
    shares_cores: bool = False

    @property
    def iterations(self) -> tuple[LoggedIteration, ...]:
        """The iterations of its first round."""
        return self.rounds[0] if self.rounds else ()

    @property
    def timed(self) -> list[LoggedIteration]:
        """The iterations after the warm-up, of all rounds."""
        return [row for row in chain(*self.rounds) if row.number > self.warmup]

    @property
    def times_s(self) -> list[float]:
        """Seconds of each timed iteration."""
        return [row.elapsed_ms / 1e3 for row in self.timed]

    def losses(self) -> dict[int, float]:
        """The loss of each iteration of the first round that has one."""
        return _losses(self.iterations)

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


def read_run(path: Path, name: str, warmup: int) -> Run:
    """Return the run recorded in a log file, or in a folder with logs and traces.

    If a folder has no logs, the logs beside it count: those of its name or, for a folder ``trace``,
    all in its parent. While ``--schedule auto`` tries its choices, no iteration is timed.

    Raises:
        ValueError: the path has no record of a run.
        OSError: the path cannot be read.
    """
    rounds, traces, text = [], [], ""
    for place in rounds_of(path):
        files = [place]
        if place.is_dir():
            files = _logs(place, _LOGS) or _logs_beside(place.absolute())
        # An iteration that ran again after a restart counts as in its last run.
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        iterations = {row.number: row for each in texts for row in parse(each)}
        if iterations:
            rounds.append(tuple(iterations[number] for number in sorted(iterations)))
            text = texts[0]
            if chosen := max(map(chosen_after, texts)):
                warmup = max(warmup, rounds[-1][0].number - 1 + chosen)
        traces += [folder for folder in (place, place / "trace") if any(folder.glob("rank-*.json"))]
    if not rounds and not traces:
        raise ValueError(
            f"{path}: found no line with 'elapsed time per iteration' and no trace; give the "
            "output of a training run, or a folder with it and what --trace wrote"
        )
    ranks, traced = read_ranks(traces[-1]) if traces else (), None
    if ranks:
        timeline = to_timeline(pipeline(ranks))
        traced = View(name=name, timeline=timeline, row=measured(ranks, timeline))
    return Run(
        name=name,
        rounds=tuple(rounds),
        warmup=warmup,
        traced=traced,
        flags=arguments(text),
        shares_cores=any(rank.shares_cores for rank in ranks),
    )


def rounds_of(path: Path) -> list[Path]:
    """Return the folder of each time that a run ran, or the run's own."""
    return sorted(path.glob("round-*"), key=lambda each: (len(each.name), each.name)) or [path]


def runs_in(folder: Path) -> tuple[list[Path], str]:
    """Return the finished runs in a folder of them, in the order of their names.

    The second value names the runs that have not finished, and how to go on; it may be empty.

    Raises:
        ValueError: fewer than two have finished once.
    """
    finished, missing = [], []
    for path in sorted(each for each in folder.iterdir() if each.is_dir()):
        lacking = [place for place in rounds_of(path) if not _has_finished(place)]
        missing += [str(place.relative_to(folder)) for place in lacking]
        if lacking != rounds_of(path):
            finished.append(path)
    resume = folder / _RESUME
    how = resume.read_text().strip() if resume.exists() else "train them to their end"
    told = f"{folder}: not finished: {', '.join(missing)}; to go on: {how}" if missing else ""
    if len(finished) < 2:
        raise ValueError(
            told or f"{folder}: {len(finished)} runs in it; give two runs, or a folder of them"
        )
    return finished, told


def _has_finished(place: Path) -> bool:
    texts = (file.read_text(errors="replace") for file in _logs(place, _LOGS))
    return has_ended([row for text in texts for row in parse(text)])


def has_ended(rows: Sequence[LoggedIteration]) -> bool:
    """Return True if the last line of a log is that of the last iteration."""
    return bool(rows) and rows[-1].number == rows[-1].last


def check_same_job(runs: Sequence[Run]) -> None:
    """Return if all runs train one model on batches of one size from one seed.

    Raises:
        ValueError: a run does not, as far as the logs list the flags.
    """
    first = runs[0]
    for run in runs[1:]:
        for flag, what in _JOB.items():
            ours, theirs = first.flags.get(flag), run.flags.get(flag)
            if ours and theirs and ours != theirs:
                raise ValueError(
                    f"{run.name} trained another {what} than {first.name}: {flag} {theirs}, not "
                    f"{ours}; compare runs of one model, batch and seed"
                )


def _logs(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted(found for pattern in patterns for found in folder.glob(pattern))


def _logs_beside(folder: Path) -> list[Path]:
    of_name = [pattern.replace("*", glob.escape(folder.name)) for pattern in _LOGS]
    return _logs(folder.parent, _LOGS if folder.name == "trace" else of_name)


def _speed_ratio(first: Run, second: Run) -> Ratio:
    """Return by how much the second run's samples per second exceed the first's.

    If a line does not give its number of samples, all iterations count as equally large.

    The ratio is of medians. The interval is a 95% bootstrap over iterations. It covers the scatter
    between two runs of one job only where both ran in several rounds.
    """
    timed = [run.timed for run in (first, second)]
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


def speed_ratios(runs: Sequence[Run]) -> tuple[Ratio, ...]:
    """Return how many times as fast the last run is as each of the others, in their order."""
    *others, last = runs
    return tuple(_speed_ratio(other, last) for other in others)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossAgreement:
    """The differences between the losses of runs, iteration by iteration.

    Attributes:
        common: iterations that have a loss in all runs, and in all rounds of each.
        equal: how many of these are equal in every digit that was logged.
        largest: the largest relative difference from the first run.
    """

    common: int
    equal: int
    first_difference: int | None
    largest: float


def compare_losses(runs: Sequence[Run]) -> LossAgreement:
    """Compare the losses of the iterations that all runs logged."""
    first, *others = [_losses(rows) for run in runs for rows in run.rounds or ((),)]
    common = sorted(first.keys() & set.intersection(*(set(other) for other in others)))
    differing = [n for n in common if any(other[n] != first[n] for other in others)]
    off = [abs(first[n] - other[n]) / (abs(first[n]) or 1.0) for other in others for n in common]
    return LossAgreement(
        common=len(common),
        equal=len(common) - len(differing),
        first_difference=differing[0] if differing else None,
        largest=max((inf if gap != gap else gap for gap in off), default=0.0),
    )


def _losses(rows: Iterable[LoggedIteration]) -> dict[int, float]:
    return {row.number: row.loss for row in rows if row.loss is not None}
