"""Reads the iterations in Megatron's training log."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median, quantiles

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|(.*)")
_KEPT = re.compile(r"kept after (\d+) iterations")  # in the table of `Trial`
_ARGUMENT = re.compile(r"^ {2}(\w+) \.* ?(\S.*)$", re.M)
_FIELDS = {
    "elapsed_ms": re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)"),
    # Megatron's, or where a script has a loss of its own the first that is named so.
    "loss": re.compile(r"(?:.*\| lm loss|.*?\|[^|:]* loss): (\S+)"),
    "batch_size": re.compile(r"global batch size: +(\d+)"),
    "tflops": re.compile(r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedIteration:
    """One line of the log, with None for values that it lacks.

    The loss is missing where Megatron skipped the update, TFLOP/s per GPU without
    ``--log-throughput``. With ``--log-interval`` N, a line is the mean of N iterations.
    """

    number: int
    last: int | None = None
    """The number of the run's last one."""
    elapsed_ms: float
    loss: float | None = None
    batch_size: float | None = None
    tflops: float | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of a number of times."""

    median_ms: float
    lower_ms: float
    upper_ms: float

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> "Spread":
        """Summarise at least one time."""
        if len(times_ms) == 1:
            return cls(times_ms[0], times_ms[0], times_ms[0])
        lower_ms, _, upper_ms = quantiles(times_ms, n=4, method="inclusive")
        return cls(median(times_ms), lower_ms, upper_ms)

    def __str__(self) -> str:
        return f"{self.median_ms:.0f} ({self.lower_ms:.0f}-{self.upper_ms:.0f})"


def parse(text: str) -> list[LoggedIteration]:
    """Read the iterations in a log.

    Lines that are still being written, or whose numbers are garbled, are left out: several ranks
    may write into one file at once.
    """
    iterations = []
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n") or not (found := _ITERATION.search(line)):
            continue
        try:
            fields = {
                name: float(value[1])
                for name, pattern in _FIELDS.items()
                if (value := pattern.search(found[3]))
            }
        except ValueError:
            continue
        if 0 < fields.get("elapsed_ms", 0) < inf:
            row = LoggedIteration(number=int(found[1]), last=int(found[2]), **fields)
            iterations.append(row)
    return iterations


def chosen_after(text: str) -> int:
    """Return how many iterations ``--schedule auto`` took to choose; 0 if no log says so."""
    return max(map(int, _KEPT.findall(text)), default=0)


def arguments(text: str) -> dict[str, str]:
    """Return the values of Megatron's flags, by the names under which its log lists them."""
    return dict(_ARGUMENT.findall(text))
