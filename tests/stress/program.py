"""What programs share that draw cases for some minutes and log each of them."""

import json
import time
from argparse import ArgumentParser, RawTextHelpFormatter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def options(text: str | None, log: str) -> ArgumentParser:
    """Return a parser of the options that they have."""
    parser = ArgumentParser(description=text, formatter_class=RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--log", type=Path, default=Path("out", log))
    return parser


def until[T](end_s: float, cases: Iterable[T]) -> Iterator[T]:
    """Yield cases until `time.monotonic` says so."""
    for case in cases:
        if time.monotonic() > end_s:
            return
        yield case


def append(log: Path, **row: Any) -> None:
    """Add a line to a log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(json.dumps(row) + "\n")
