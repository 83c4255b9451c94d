"""A cell of the grid, and its runs, which are kept so that a grid that was interrupted goes on."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from megatron.fold3d.observe.training_log import LoggedIteration
from scripts.bench import compare, summary
from scripts.bench.runner import Bench
from scripts.bench.summary import Run
from scripts.bench.variants import DEFAULT, Job, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(ABC):
    """A job on links of one rate, and what runs there.

    Attributes:
        slow_down: how much longer layers and transfers last than they would.
    """

    num_ranks: int
    data_parallel: int
    recompute: bool = False
    slow_down: float = 1.0
    first_round: ClassVar[int]

    @property
    def sizes(self) -> str:
        """What the name of the cell begins with; runs that are kept go by it."""
        slower = "" if self.slow_down == 1 else f"{self.slow_down:g} times slower: "
        recompute = ", recompute" if self.recompute else ""
        return f"{slower}pp={self.num_ranks} x dp={self.data_parallel}{recompute}"

    @property
    @abstractmethod
    def name(self) -> str:
        """As the table has it."""

    @property
    @abstractmethod
    def job(self) -> Job:
        """What is trained; its iterations are the run's."""

    def problems(self, runs: Sequence[Run]) -> Iterator[str]:
        """Yield the runs that failed, and those whose losses are not those of the first alike.

        Runs that do not clip as the others are alike among themselves.
        """
        clipped = [run for run in runs if "-auto-" not in run.variant.name]
        for some in (clipped, [run for run in runs if run not in clipped]):
            longest_first = sorted(some, key=lambda run: len(run.iterations), reverse=True)
            _, lines = summary.loss_disagreements(longest_first, self.job.loss_tolerance)
            lines += [f"{run.variant.name}: {run.failure}" for run in some if run.failure]
            yield from (f"{self.name}: {line}" for line in lines)

    def key(self, variant: Variant, number: int) -> str:
        """Return the name under which a run is kept."""
        return f"{self.name}, {variant.name}, round {number}"


class KeptRuns:
    """Runs by key, in ``runs.json`` of a folder."""

    def __init__(self, logs: Path) -> None:
        self._file = logs / "runs.json"
        self._runs: dict[str, dict[str, Any]] = {}
        if self._file.exists():
            self._runs = json.loads(self._file.read_text())

    def find(self, key: str, variant: Variant) -> Run | None:
        """Return a run that has ended, well or not."""
        if key not in self._runs:
            return None
        entry = self._runs[key]
        iterations = tuple(LoggedIteration(**values) for values in entry["iterations"])
        return Run(**(entry | {"variant": variant, "iterations": iterations}))

    def measure(self, key: str, bench: Bench, variant: Variant, number: int) -> None:
        """Run a variant, unless it has run well."""
        if key in self._runs and not self._runs[key]["failure"]:
            return
        run = bench.run(variant, number)
        what = run.failure or str(sorted(round(ms) for ms in run.times_ms))
        compare.say(f"{key}: {what}")
        self._runs[key] = asdict(replace(run, variant=DEFAULT))
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._runs, indent=1))
