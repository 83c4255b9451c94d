"""Runs that are kept in a file, so that a grid that was interrupted goes on."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron.fold3d.observe.training_log import LoggedIteration
from scripts.bench import compare, summary
from scripts.bench.runner import Bench
from scripts.bench.summary import Run
from scripts.bench.variants import DEFAULT, Variant


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


def problems(cell: str, runs: Sequence[Run]) -> Iterator[str]:
    """Yield the runs of a cell whose losses are not those of the first, and those that failed."""
    longest_first = sorted(runs, key=lambda run: len(run.iterations), reverse=True)
    yield from (f"{cell}: {line}" for line in summary.loss_disagreements(longest_first)[1])
    yield from (f"{cell}: {run.variant.name}: {run.failure}" for run in runs if run.failure)
